"""Test tools, model clients and errors of the adapter itself."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import pydantic
import pytest

pytest.importorskip("autogen_agentchat")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import MultiModalMessage
from autogen_core import CancellationToken, Image, InMemoryStore
from autogen_core.models import UserMessage
from autogen_core.tools import TextResultContent, ToolResult, Workbench
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.models.replay import ReplayChatCompletionClient

from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.schema import semconv
from lightspan.schema.spans import SpanStatus
from lightspan_autogen import _hook
from lightspan_testing.adapter_harness import Part, Says, Stage
from lightspan_testing.adapter_suite import Turn, instructions, tree
from lightspan_testing.adapter_suite.checks import check_image
from lightspan_testing.byte_tokenizer import image_file
from lightspan_testing.scripted import ScriptedServer
from packages.autogen.tests.autogen_apps import INFO, SAYS, WRITER, Rig, two

pytestmark = pytest.mark.usefixtures("installed_autogen")


class Paint(pydantic.BaseModel):
    color: str


async def test_a_tool_that_returns_what_no_span_can_carry(rig: Rig) -> None:
    def huge() -> str:
        """Huge."""
        return "x" * 1_000_000

    def binary() -> bytes:
        """Binary."""
        return b"\x00\xff"

    def surrogate() -> str:
        """No text."""
        return "\ud800"

    scout = rig.agent("scout", huge, binary, surrogate)
    for name, shown in (
        ("huge", "x" * 65_536 + "… (1000000 characters)"),
        ("binary", "b'\\x00\\xff'"),
        ("surrogate", "\ufffd"),
    ):
        says: Says = {"scout": [Turn(calls=[(name, "{}")])]}
        await rig.record(says, lambda text: scout.run(task=text))
        result = rig.one(f"execute_tool {name}").attributes["gen_ai.tool.call.result"]
        assert result == shown
        await scout.on_reset(CancellationToken())


class Own(Workbench):
    """A custom workbench, such as that of an MCP server."""

    component_type = "workbench"

    async def list_tools(self) -> Any:
        empty = {"type": "object", "properties": {}}
        return [{"name": n, "description": n, "parameters": empty} for n in ("good", "bad")]

    async def call_tool(
        self, name: str, arguments: Any = None, cancellation_token: Any = None, call_id: Any = None
    ) -> ToolResult:
        content = [TextResultContent(content=f"{name} result")]
        return ToolResult(name=name, result=content, is_error=name == "bad")

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self) -> None: ...

    async def save_state(self) -> Any: ...

    async def load_state(self, state: Any) -> None: ...


async def test_a_workbench_of_the_users_own(rig: Rig) -> None:
    scout = AssistantAgent(
        "scout", rig.client, workbench=Own(), system_message=instructions("scout")
    )
    says: Says = {"scout": [Turn(calls=[("good", "{}"), ("bad", "{}")])]}
    await rig.record(says, lambda text: scout.run(task=text))
    good, bad = rig.one("execute_tool good"), rig.one("execute_tool bad")
    assert (good.status, bad.status) == (SpanStatus.OK, SpanStatus.ERROR)
    assert bad.attributes["error.type"] == "tool_error"
    assert good.attributes["gen_ai.tool.call.result"] == "good result"
    assert str(good.attributes["gen_ai.tool.call.id"]).startswith("call")


# --- model clients --------------------------------------------------------------------------
class Other(ReplayChatCompletionClient):
    """A model client that does not use the OpenAI SDK."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cached_bool_value = False


async def test_an_image_that_such_a_client_is_shown_is_a_reference(rig: Rig) -> None:
    from PIL import Image as Picture

    seen = MultiModalMessage(
        content=["What is this?", Image(Picture.new("RGB", (1, 1)))], source="user"
    )
    client = Other(["a dot"], model_info={**INFO, "vision": True})  # else AutoGen takes it out
    writer = AssistantAgent("writer", client, system_message="")
    await rig.record({}, lambda text: writer.run(task=seen))
    (call,) = (span for span in rig.spans if span.kind == "llm")
    *_, message = json.loads(str(call.attributes[semconv.INPUT_MESSAGES]))
    text, picture = message["parts"]
    assert text == {"type": "text", "content": "What is this?"}
    assert (picture["type"], picture["modality"], picture["mime_type"]) == (
        *("blob", "image", "image/png"),
    )
    assert set(picture) == {"type", "modality", "mime_type", "size", "sha256"}


@pytest.mark.parametrize("through_gateway", [True, False], ids=["gateway", "endpoint"])
async def test_an_image_of_a_message(image_stage: Stage, through_gateway: bool) -> None:
    """Check a `MultiModalMessage`, whose images AutoGen sends as PNG files of its own."""
    image = Image.from_base64(b64encode(image_file("red")).decode())
    client = OpenAIChatCompletionClient(
        model="m",
        base_url=image_stage.url,
        api_key="key",
        model_info={**INFO, "vision": True},
        max_retries=0,
    )
    writer = AssistantAgent("writer", client, system_message=instructions("writer"))
    played = image_stage.open(Part({"writer": ["red"]}), through_gateway=through_gateway)
    seen = MultiModalMessage(content=[played.text, image], source="user")
    with open_scope(played.scope):
        await writer.run(task=seen)
    await sdk_instrumentation.aclose()
    image_stage.close(played)
    await client.close()
    assert played.tree == ["invoke_agent writer @writer", "  chat m @writer"]
    check_image(image_stage, played, b64decode(image.to_base64()))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_bypasses_the_sdk_is_recorded_without_tokens(
    rig: Rig, streamed: bool
) -> None:
    writer = AssistantAgent("writer", Other(["one two"]), model_client_stream=streamed)
    await rig.record({}, lambda text: writer.run(task=text))
    assert rig.tree == WRITER
    (call,) = (span for span in rig.spans if span.kind == "llm")
    assert call.name == "chat Other"
    assert rig.played is not None
    assert rig.played.records == []
    known = {
        key: value
        for key, value in call.attributes.items()
        if key not in (semconv.CALL_ID, semconv.INPUT_MESSAGES)
    }
    assert known == {
        "lightspan.agent.path": "writer",
        "lightspan.route": "app",
        "lightspan.call.outcome": "ok",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "Other",
        "openinference.span.kind": "LLM",
        "gen_ai.usage.input_tokens": known["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.output.messages": '[{"role":"assistant","parts":[{"type":"text","content":'
        '"one two"}],"finish_reason":"stop"}]',
        "lightspan.client": "packages.autogen.tests.test_clients.Other",
        "lightspan.client.fix": "use autogen_ext.models.openai.OpenAIChatCompletionClient in its "
        "place",
    }
    messages = json.loads(str(call.attributes[semconv.INPUT_MESSAGES]))
    assert [message["role"] for message in messages] == ["system", "user"]


# --- AutoGen's cache ------------------------------------------------------------------------
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_cache_does_not_answer_for_the_policy(rig: Rig, streamed: bool) -> None:
    """Check that answers of the policy are neither read from AutoGen's cache nor stored in it."""
    store: InMemoryStore[Any] = InMemoryStore()
    cache = ChatCompletionCache(rig.client, store)

    async def run(text: str) -> None:
        for _ in range(2):
            writer = AssistantAgent(
                "writer",
                cache,
                system_message=instructions("writer"),
                model_client_stream=streamed,
            )
            await writer.run(task=text)

    await rig.record({"writer": ["W {task}."]}, run)
    assert rig.tree == WRITER * 2
    assert rig.played is not None
    assert len(rig.played.records) == 2
    assert store.store == {}


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_a_cache_answers_elsewhere_is_recorded(rig: Rig, streamed: bool) -> None:
    cache = ChatCompletionCache(Other(["one two"]))
    played = rig.stage.open(Part({}), through_gateway=False)
    with open_scope(played.scope):
        for _ in range(2):
            writer = AssistantAgent("writer", cache, model_client_stream=streamed)
            await writer.run(task="go")
    played.close()
    assert tree(played.spans) == WRITER * 2
    names = [span.name for span in played.llm_spans]
    assert names == ["chat Other", "chat ChatCompletionCache"]
    assert {span.attributes[semconv.ROUTE] for span in played.llm_spans} == {"app"}
    asked, cached = (span.attributes for span in played.llm_spans)
    assert (semconv.CACHED in asked, cached[semconv.CACHED]) == (False, True)
    assert semconv.usage_of(asked) == (21, 2)
    assert semconv.usage_of(cached) == (None, None)


# --- our own errors -------------------------------------------------------------------------
async def test_an_error_of_ours_damages_the_attempt_and_never_reaches_the_app(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    for name in ("enter", "span_of"):
        with monkeypatch.context() as patch:
            patch.setattr(_hook, name, bad)
            played = rig.stage.open(Part(SAYS), through_gateway=True)
            with open_scope(played.scope):
                result = await two(rig).run(task=played.text)
            await sdk_instrumentation.aclose()
        assert len(result.messages) == 3
        reasons = set(played.scope.recorder.capture_errors())
        assert reasons == {"lightspan_autogen: RuntimeError: a bug of ours"}


@pytest.mark.parametrize("asked", [True, Paint], ids=["any", "schema"])
# The OpenAI SDK's own: its parsed answers are dumped by a field of another type.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
async def test_what_json_output_asks_for(asked: Any) -> None:
    """Check AutoGen's part of the table in `docs/guides/structured-output.md`."""
    with ScriptedServer('{"color":"red"}') as server:
        client = OpenAIChatCompletionClient(
            model="m", base_url=server.url, api_key="key", model_info=INFO, max_retries=0
        )
        await client.create([UserMessage(content="?", source="me")], json_output=asked)
        await client.close()
    [request] = server.requests
    assert request.body["response_format"]["type"] == (
        "json_object" if asked is True else "json_schema"
    )
