"""Test custom models that use no OpenAI client: their requests and answers are recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    Model,
    ModelResponse,
    ModelSettings,
    Runner,
    Usage,
    handoff,
)
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseUsage,
)

from lightspan.production.feedback import feedback
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan.schema.spans import Span, SpanStatus
from lightspan_openai_agents import instrument
from lightspan_testing.adapter_suite.checks import check_untrained
from lightspan_testing.attempts import captured, read_recorded
from lightspan_testing.scripted import ScriptedServer
from packages.openai_agents.tests.openai_agents_apps import (
    HOW,
    Run,
    chat,
    look,
    run_async,
    run_streamed,
)

pytestmark = pytest.mark.usefixtures("installed_openai_agents")


class Mine(Model):
    """A custom model that answers with words, one by one if streamed.

    Args:
        text: the words of the answer.
        stops: the word of a stream at which it stops; empty to stop at none.
        fails: exception to raise at that word; None to wait for ever.
    """

    def __init__(self, text: str = "one two three", stops: str = "", fails: Any = None) -> None:
        self.words = text.split()
        self.stops = stops
        self.fails = fails

    async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
        return self.respond()

    async def stream_response(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        async for event in self.stream():
            yield event

    def respond(self) -> ModelResponse:
        if self.fails:
            raise self.fails
        usage = Usage(requests=1, input_tokens=5, output_tokens=3, total_tokens=8)
        return ModelResponse(self.response("completed").output, usage, "resp-mine")

    async def stream(self) -> AsyncIterator[Any]:
        begun = self.response("in_progress")
        yield ResponseCreatedEvent(response=begun, sequence_number=0, type="response.created")
        for number, word in enumerate(self.words):
            if word == self.stops:
                if self.fails:
                    raise self.fails
                await asyncio.Event().wait()
            yield ResponseTextDeltaEvent(
                content_index=0,
                delta=f" {word}" if number else word,
                item_id="1",
                logprobs=[],
                output_index=0,
                sequence_number=number + 1,
                type="response.output_text.delta",
            )
        yield ResponseCompletedEvent(
            response=self.response("completed"), sequence_number=9, type="response.completed"
        )

    def response(self, status: Any) -> Response:
        part = ResponseOutputText(
            text=" ".join(self.words), type="output_text", annotations=[], logprobs=[]
        )
        message = ResponseOutputMessage(
            id="1", content=[part], role="assistant", status="completed", type="message"
        )
        usage: Any = {
            "input_tokens": 5,
            "output_tokens": 3,
            "total_tokens": 8,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        is_done = status == "completed"
        return Response(
            id="resp-mine",
            created_at=0,
            model="mine-1",
            object="response",
            output=[message] if is_done else [],
            parallel_tool_calls=False,
            status=status,
            tool_choice="auto",
            tools=[],
            usage=ResponseUsage.model_validate(usage) if is_done else None,
        )


def agent_of(model: Model, **more: Any) -> Agent[Any]:
    return Agent(name="writer", instructions="You are writer.", model=model, **more)


def said_of(span: Span) -> dict[str, Any]:
    """Return all attributes of a call except its id and its client, with decoded messages."""
    known = dict(span.attributes)
    if c.CLIENT in known:
        assert known.pop(c.CLIENT) == f"{__name__}.Mine"
        assert known.pop(c.CLIENT_FIX) == "use agents.OpenAIChatCompletionsModel in its place"
    assert str(known.pop(c.CALL_ID)).startswith("call-")
    for name in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.TOOL_DEFINITIONS):
        if name in known:
            known[name] = json.loads(str(known[name]))
    return known


ASKED = {
    c.AGENT_PATH: "writer",
    c.ROUTE: "app",
    c.OPERATION_NAME: "chat",
    c.OPENINFERENCE_KIND: "LLM",
    c.REQUEST_MODEL: "Mine",
    c.INSTRUCTIONS: True,
    c.INPUT_MESSAGES: [
        {"role": "system", "parts": [{"type": "text", "content": "You are writer."}]},
        {"role": "user", "parts": [{"type": "text", "content": "go"}]},
    ],
}


def saying(text: str, finish: str | None = None) -> list[Any]:
    finished = {"finish_reason": finish} if finish else {}
    return [{"role": "assistant", "parts": [{"type": "text", "content": text}], **finished}]


PARTLY = {
    **ASKED,
    c.REQUEST_STREAM: True,
    c.RESPONSE_ID: "resp-mine",
    c.RESPONSE_MODEL: "mine-1",
    c.OUTPUT_MESSAGES: saying("one two"),
}
"""Attributes of a stream that stopped before its third word."""


# --- whole ----------------------------------------------------------------------------------
@HOW
def test_a_model_of_the_users_own(run: Run) -> None:
    with captured() as attempt:
        assert run(agent_of(Mine())).final_output == "one two three"
    assert attempt.tree == ["invoke_agent writer @writer", "  chat Mine @writer"]
    streamed = {c.REQUEST_STREAM: True, c.RESPONSE_MODEL: "mine-1"} if run is run_streamed else {}
    assert attempt.one("chat Mine").attributes[c.CLIENT] == f"{__name__}.Mine"
    assert said_of(attempt.one("chat Mine")) == {
        **ASKED,
        **streamed,
        c.CALL_OUTCOME: "ok",
        c.RESPONSE_ID: "resp-mine",
        c.INPUT_TOKENS: 5,
        c.OUTPUT_TOKENS: 3,
        c.FINISH_REASONS: ["stop"],
        c.OUTPUT_MESSAGES: saying("one two three", "stop"),
    }
    check_untrained(attempt)


def test_what_it_is_offered_and_how_it_samples() -> None:
    settings = ModelSettings(temperature=0.5, top_p=0.9, max_tokens=64)
    other = handoff(agent_of(Mine()), tool_name_override="to_other")
    writer = agent_of(Mine(), tools=[look], handoffs=[other], model_settings=settings)
    with captured() as attempt:
        run_async(writer)
    said = said_of(attempt.one("chat Mine"))
    offered = said[c.TOOL_DEFINITIONS]
    assert [(one["type"], one["function"]["name"]) for one in offered] == [
        ("function", "look"),
        ("function", "to_other"),
    ]
    assert offered[0]["function"]["parameters"] == look.params_json_schema
    assert (said[c.REQUEST_TEMPERATURE], said[c.REQUEST_TOP_P]) == (0.5, 0.9)
    assert said[c.REQUEST_MAX_TOKENS] == 64


@HOW
def test_a_model_around_another_is_one_call(server: ScriptedServer, run: Run) -> None:
    class Around(Model):
        def __init__(self, inner: Model) -> None:
            self.inner = inner

        async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
            return await self.inner.get_response(*args, **more)

        def stream_response(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
            return self.inner.stream_response(*args, **more)

    with captured() as attempt:
        run(agent_of(Around(Mine())))
        run(agent_of(Around(chat(server))))
    assert attempt.tree == [
        "invoke_agent writer @writer",
        "  chat Mine @writer",
        "invoke_agent writer @writer",
        "  chat m @writer",
    ]


def test_models_are_left_as_they_were() -> None:
    assert hasattr(Mine.get_response, "__wrapped__")
    with instrument():  # it is on already

        class Late(Mine):
            async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
                return await super().get_response(*args, **more)

        assert hasattr(Late.get_response, "__wrapped__")
    from lightspan_openai_agents import uninstrument

    uninstrument()
    assert not hasattr(Mine.get_response, "__wrapped__")
    assert not hasattr(Mine.stream_response, "__wrapped__")
    assert not hasattr(Late.get_response, "__wrapped__")
    assert "__init_subclass__" not in vars(Model)
    with captured() as attempt:
        run_async(agent_of(Mine()))
    assert attempt.spans == []


# --- ended early ----------------------------------------------------------------------------
async def test_a_run_that_is_cancelled() -> None:
    with captured() as attempt:
        result = Runner.run_streamed(agent_of(Mine(stops="three")), "go")
        said = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                said += getattr(event.data, "delta", "")
            if said == "one two":
                result.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)
    [span] = attempt.llm_spans
    said_there = said_of(span)
    for name in (c.ERROR_TYPE, c.EXCEPTION_TYPE):
        assert said_there.pop(name) == "CancelledError"
    for name in (c.EXCEPTION_MESSAGE, c.EXCEPTION_STACKTRACE):
        said_there.pop(name)
    assert said_there == {**PARTLY, c.CALL_OUTCOME: "cancelled"}


@HOW
def test_a_model_that_fails(run: Run) -> None:
    model = Mine(stops="three", fails=ConnectionError("no more"))
    with captured() as attempt, pytest.raises(ConnectionError, match="no more"):
        run(agent_of(model))
    [span] = attempt.llm_spans
    said = said_of(span)
    for name in (c.ERROR_TYPE, c.EXCEPTION_TYPE):
        assert said.pop(name) == "ConnectionError"
    said.pop(c.EXCEPTION_MESSAGE), said.pop(c.EXCEPTION_STACKTRACE)
    expected = PARTLY if run is run_streamed else ASKED
    assert said == {**expected, c.CALL_OUTCOME: "error"}
    assert (span.status, span.status_message) == (SpanStatus.ERROR, "no more")


# --- in production --------------------------------------------------------------------------
@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("LIGHTSPAN_STORE", raising=False)
    return f"sqlite:{tmp_path / 'production.db'}"


@HOW
def test_a_model_of_the_users_own_in_production(url: str, run: Run) -> None:
    with record(url):
        run(agent_of(Mine()))
    [found] = read_recorded(url)
    assert found.answered == [("go", "one two three")]
    assert found.attempt.status == "succeeded"
    rated = feedback("resp-mine", 1.0, store=url)
    assert rated.call_id == found.calls[0].attributes[c.CALL_ID]
