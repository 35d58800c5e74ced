"""Test model clients: the Responses API at the gateway, and clients that bypass the OpenAI SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    input_guardrail,
    set_default_openai_api,
)

from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan_testing.adapter_harness import Part, Stage, Turn
from lightspan_testing.adapter_suite.checks import check_image
from lightspan_testing.attempts import captured
from lightspan_testing.byte_tokenizer import data_url, image_file
from lightspan_testing.scripted import ScriptedServer
from packages.openai_agents.tests.openai_agents_apps import (
    AGENT_WITH_TOOL,
    async_client,
    look,
    make,
    run_async,
)

pytestmark = pytest.mark.usefixtures("installed_openai_agents")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_that_the_gateway_keeps(stage: Stage, streamed: bool) -> None:
    """Check `auto_previous_response_id`: the SDK sends only new items, but the model gets all of
    them.
    """
    turn = Turn(text="Let me see.", calls=[("look", '{"what": "seven"}')])
    played = stage.open(Part({"scout": [turn, "Seven, {task}."]}), through_gateway=True)
    model = OpenAIResponsesModel("m", async_client(stage))
    scout = Agent(name="scout", instructions="You are scout.", model=model, tools=[look])

    async def main() -> None:
        more: Any = {"auto_previous_response_id": True}
        if streamed:
            result = Runner.run_streamed(scout, played.text, **more)
            async for _ in result.stream_events():
                pass
        else:
            await Runner.run(scout, played.text, **more)
        await sdk_instrumentation.aclose()

    with open_scope(played.scope):
        asyncio.run(main())
    stage.close(played)
    assert played.tree == AGENT_WITH_TOOL
    first, second = sorted(played.records, key=lambda record: record.sequence_start)
    prompt = stage.tokenizer.decode(second.prompt_ids)
    for told in ("You are scout.", played.text, "Let me see.", '"seven"', "seven: 7"):
        assert prompt.count(told) >= 1
    # the first prompt, but for what asks for an answer, begins the second: nothing was lost
    asks = len(stage.tokenizer.encode("assistant:"))
    assert second.prompt_ids[: len(first.prompt_ids) - asks] == first.prompt_ids[:-asks]


@pytest.mark.parametrize(
    ("model", "through_gateway"),
    [
        (OpenAIResponsesModel, True),
        (OpenAIChatCompletionsModel, True),
        (OpenAIChatCompletionsModel, False),
    ],
    ids=["responses", "chat", "chat-endpoint"],
)
def test_an_image_of_the_input(image_stage: Stage, model: Any, through_gateway: bool) -> None:
    """Check `input_image`, which the SDK sends as `image_url` to chat completions."""
    played = image_stage.open(Part({"scout": ["red"]}), through_gateway=through_gateway)
    scout = Agent(
        name="scout", instructions="You are scout.", model=model("m", async_client(image_stage))
    )
    red = image_file("red")
    content = [
        {"type": "input_text", "text": played.text},
        {"type": "input_image", "image_url": data_url(red), "detail": "auto"},
    ]

    async def main() -> None:
        await Runner.run(scout, [{"role": "user", "content": content}])
        await sdk_instrumentation.aclose()

    with open_scope(played.scope):
        asyncio.run(main())
    image_stage.close(played)
    assert played.tree == ["invoke_agent scout @scout", "  chat m @scout"]
    check_image(image_stage, played, red)


@pytest.mark.parametrize("model", ["gpt-4.1-mini", "gpt-5", None])
@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_an_app_that_names_a_model_only(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, api: Any, model: str | None
) -> None:
    """Check the SDK's own provider and client, with the placeholder key that runners set.

    For some models the SDK adds settings (a verbosity, a reasoning effort) that no engine has.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "placeholder")
    set_default_openai_api(api)
    played = stage.open(Part({"writer": ["Done, {task}."]}), through_gateway=True)
    writer = Agent(name="writer", instructions="You are writer.", model=model)

    async def main() -> Any:
        try:
            return await Runner.run(writer, played.text)
        finally:
            await sdk_instrumentation.aclose()

    try:
        with open_scope(played.scope):
            assert asyncio.run(main()).final_output == f"Done, {played.tag}."
    finally:
        set_default_openai_api("responses")
    stage.close(played)
    assert [record.agent_path for record in played.records] == ["writer"]


# --- model clients that bypass the OpenAI SDK -----------------------------------------------


def test_a_guardrail_that_stops_a_turn_makes_no_call(server: ScriptedServer) -> None:
    @input_guardrail(name="closed", run_in_parallel=False)
    def closed(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    writer = make(server, "writer", input_guardrails=[closed])
    with captured() as attempt, pytest.raises(InputGuardrailTripwireTriggered):
        run_async(writer)
    assert attempt.calls == []
