"""Test the wrapper of Anthropic's SDK: what reaches the gateway, and which spans are recorded."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest

from lightspan.capture import sdk_instrumentation
from lightspan.capture._globals import state
from lightspan.capture.emit import agent
from lightspan.capture.entry import open_scope
from lightspan.capture.sdks import OPENAI
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import output_messages_of
from lightspan.schema.images import Image
from lightspan.schema.media import digests_in
from lightspan.schema.spans import SpanStatus
from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from packages.core.tests.capture.clients import acting_as, llm_spans, make_scope

pytestmark = pytest.mark.usefixtures("unwrapped")

ASKED: dict[str, Any] = {
    "model": "claude",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
}


def client_of(server: ScriptedServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": server.origin, "api_key": "app-key", **options})


def async_client_of(server: ScriptedServer, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(**{"base_url": server.origin, "api_key": "app-key", **options})


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def text_of_stream(stream: Any) -> str:
    return "".join(event.delta.text for event in stream if event.type == "content_block_delta")


def _helper_stream(client: Any) -> str:
    with client.messages.stream(**ASKED) as stream:
        return text_of(stream.get_final_message())


def _streaming_response(client: Any) -> str:
    with client.messages.with_streaming_response.create(**ASKED) as response:
        return str(json.loads(response.read())["content"][0]["text"])


WAYS: dict[str, Any] = {
    "create": lambda client: text_of(client.messages.create(**ASKED)),
    "stream=True": lambda client: text_of_stream(client.messages.create(**ASKED, stream=True)),
    "stream()": _helper_stream,
    "raw": lambda client: text_of(client.messages.with_raw_response.create(**ASKED).parse()),
    "raw stream": lambda client: text_of_stream(
        client.messages.with_raw_response.create(**ASKED, stream=True).parse()
    ),
    "streaming response": _streaming_response,
    "beta": lambda client: text_of(client.beta.messages.create(**ASKED)),
    "with_options": lambda client: text_of(client.with_options(timeout=5).messages.create(**ASKED)),
}
ASYNC_WAYS = ("create", "stream=True", "stream()", "raw", "raw stream")


async def ask_async(client: anthropic.AsyncAnthropic, way: str) -> str:
    match way:
        case "create":
            return text_of(await client.messages.create(**ASKED))
        case "raw":
            return text_of(await (await client.messages.with_raw_response.create(**ASKED)).parse())
        case "stream()":
            async with client.messages.stream(**ASKED) as helper:
                return text_of(await helper.get_final_message())
    stream: Any
    if way == "raw stream":
        raw = await client.messages.with_raw_response.create(**ASKED, stream=True)
        stream = await raw.parse()
    else:
        stream = await client.messages.create(**ASKED, stream=True)
    return "".join([e.delta.text async for e in stream if e.type == "content_block_delta"])


# --- whatever way an app asks ---------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask(gateway: ScriptedServer, elsewhere: ScriptedServer, way: str) -> None:
    """Check a client that is made before the SDK is wrapped, and is used in a scope and outside."""
    with client_of(elsewhere) as client:
        assert WAYS[way](client) == "from elsewhere"
        with acting_as(gateway, "writer") as scope:
            assert WAYS[way](client) == "from the gateway"
            assert llm_spans(scope) == []  # the gateway records it
        assert WAYS[way](client) == "from elsewhere"
        with acting_as(gateway, "checker") as scope:
            assert WAYS[way](client) == "from elsewhere"
        _check_recorded(scope, elsewhere)
    assert (len(gateway.requests), len(elsewhere.requests)) == (1, 3)


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_every_async_way_to_ask(
    gateway: ScriptedServer, elsewhere: ScriptedServer, way: str
) -> None:
    async with async_client_of(elsewhere) as client:
        with acting_as(gateway, "writer") as scope:
            assert await ask_async(client, way) == "from the gateway"
            assert llm_spans(scope) == []
        with acting_as(gateway, "checker") as scope:
            assert await ask_async(client, way) == "from elsewhere"
        _check_recorded(scope, elsewhere)
    await sdk_instrumentation.aclose()
    assert (len(gateway.requests), len(elsewhere.requests)) == (1, 1)


def _check_recorded(scope: Any, elsewhere: ScriptedServer, model: str = "claude") -> None:
    """Check the spans, which are equal for every way of calling, except for `stream`."""
    assert scope.recorder.capture_errors() == []
    [span] = llm_spans(scope)
    known = dict(span.attributes)
    known.pop(c.REQUEST_STREAM, None)
    assert str(known.pop(c.CALL_ID)).startswith("call-")
    assert str(known.pop(c.RESPONSE_ID)).startswith("msg_")
    said = {"role": "assistant", "parts": [{"type": "text", "content": "from elsewhere"}]}
    assert json.loads(str(known.pop(c.OUTPUT_MESSAGES))) == [{**said, "finish_reason": "stop"}]
    assert json.loads(str(known.pop(c.INPUT_MESSAGES))) == [
        {"role": "user", "parts": [{"type": "text", "content": "hi"}]}
    ]
    assert known == {
        c.AGENT_PATH: "checker",
        c.CALL_OUTCOME: "ok",
        c.ROUTE: "app",
        c.OPERATION_NAME: "chat",
        c.PROVIDER_NAME: "anthropic",
        c.OPENINFERENCE_KIND: "LLM",
        c.REQUEST_MODEL: "claude",
        c.REQUEST_MAX_TOKENS: 9,
        c.RESPONSE_MODEL: model,
        c.FINISH_REASONS: ["stop"],
        c.INPUT_TOKENS: 4,
        c.OUTPUT_TOKENS: 2,
        c.SERVER_ADDRESS: "127.0.0.1",
        c.SERVER_PORT: int(elsewhere.origin.rpartition(":")[2]),
    }
    assert (span.name, span.status) == ("chat claude", SpanStatus.OK)


@pytest.mark.parametrize(("agent_name", "recorded"), [("writer", 0), ("checker", 1)])
def test_an_answer_that_the_app_cannot_parse(agent_name: str, recorded: int) -> None:
    class Parsed(pydantic.BaseModel):
        word: str

    with (
        ScriptedServer(lambda _: '{"sentence": "no"}') as server,
        client_of(server) as client,
        acting_as(server, agent_name) as scope,
    ):
        with pytest.raises(pydantic.ValidationError):
            client.messages.parse(**ASKED, output_format=Parsed)
        assert scope.recorder.capture_errors() == []
        spans = llm_spans(scope)
    assert len(spans) == recorded
    for span in spans:
        [message] = output_messages_of(span.attributes)
        assert message["content"] == '{"sentence": "no"}'
        assert (span.attributes[c.CALL_OUTCOME], span.attributes[c.OUTPUT_TOKENS]) == ("error", 2)


def test_repetitions_of_a_request_are_counted() -> None:
    busy = Reply(status=529, text="busy", headers={"retry-after-ms": "1"})
    with (
        ScriptedServer([busy, "hello"]) as server,
        client_of(server, max_retries=1) as client,
        acting_as(server, "checker") as scope,
    ):
        client.messages.create(**ASKED)
        [span] = llm_spans(scope)
    assert (span.attributes[c.CALL_REPEATS], span.attributes[c.CALL_OUTCOME]) == (1, "ok")


def test_a_recorded_call_with_tools(elsewhere: ScriptedServer) -> None:
    reply = Reply(tool_calls=[ToolCall(name="add", arguments='{"x": 1}', call_id="toolu_1")])
    tool: Any = {"name": "add", "input_schema": {"type": "object"}}
    with ScriptedServer(lambda request: reply) as server, client_of(server) as client:
        for streamed in (False, True):
            with acting_as(None, "checker") as scope:
                answer: Any = client.messages.create(**ASKED, tools=[tool], stream=streamed)
                if streamed:
                    list(answer)
            [span] = llm_spans(scope)
            [said] = json.loads(str(span.attributes[c.OUTPUT_MESSAGES]))
            assert said == {
                "role": "assistant",
                "parts": [
                    {"type": "tool_call", "id": "toolu_1", "name": "add", "arguments": '{"x":1}'}
                ],
                "finish_reason": "tool_calls",
            }


# --- what the gateway sees ------------------------------------------------------------------
def test_the_headers_of_a_redirected_call(
    gateway: ScriptedServer, elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no header of the app's client or of its environment reaches the gateway."""
    for name, value in {
        "ANTHROPIC_API_KEY": "env-key",
        "ANTHROPIC_AUTH_TOKEN": "env-token",
        "ANTHROPIC_CUSTOM_HEADERS": "x-of-env: yes",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    with (
        client_of(elsewhere, default_headers={"x-own": "yes"}) as client,
        open_scope(make_scope(gateway)),
        agent("team/ä b"),
        agent("writer") as span,
    ):
        client.beta.messages.create(**ASKED, extra_headers={"x-call": "yes"})
    [request] = gateway.requests
    headers = {key: value for key, value in request.headers.items() if "stainless" not in key}
    assert headers.pop(c.HEADER_CALL_ID).startswith("call-")
    assert span is not None
    for transport in ("accept-encoding", "connection", "content-length", "user-agent"):
        headers.pop(transport)
    headers.pop("anthropic-version")
    assert headers.pop("x-api-key", "per-call") == "per-call"  # of older versions
    assert headers == {
        "host": gateway.origin.removeprefix("http://"),
        "accept": "application/json",
        "content-type": "application/json",
        "authorization": "Bearer token-1",
        c.HEADER_ATTEMPT: "at-1",
        c.HEADER_AGENT: "team%2F%C3%A4%20b/writer",
        c.HEADER_PARENT: f"00-0123456789abcdef0123456789abcdef-{span.span_id}-01",
        c.HEADER_PROTOCOL: str(c.PROTOCOL_VERSION),
    }
    assert (request.path, request.body) == ("/v1/messages", ASKED)


@pytest.mark.parametrize("cloud", ["vertex", "foundry", "bedrock"])
def test_a_client_of_another_cloud_is_redirected_too(
    gateway: ScriptedServer, elsewhere: ScriptedServer, cloud: str
) -> None:
    clients: dict[str, Any] = {
        "vertex": lambda: anthropic.AnthropicVertex(
            region="r", project_id="p", access_token="own", base_url=elsewhere.origin
        ),
        "foundry": lambda: anthropic.AnthropicFoundry(api_key="own", base_url=elsewhere.origin),
        "bedrock": lambda: anthropic.AnthropicBedrock(
            aws_region="r", aws_access_key="own", aws_secret_key="own", base_url=elsewhere.origin
        ),
    }
    with clients[cloud]() as client:
        for way in ("create", "stream=True"):
            with acting_as(gateway, "writer") as scope:
                assert WAYS[way](client) == "from the gateway"
                assert llm_spans(scope) == []
            if cloud == "bedrock":
                continue  # its own calls need boto3
            with acting_as(gateway, "checker") as scope:
                assert WAYS[way](client) == "from elsewhere"
            # to Google the model goes in the path, which the scripted server does not read
            _check_recorded(scope, elsewhere, "" if cloud == "vertex" else "claude")
    assert {request.path for request in gateway.requests} == {"/v1/messages"}
    assert "own" not in {value for r in gateway.requests for value in r.headers.values()}


def test_a_client_without_any_key(
    gateway: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("ANTHROPIC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with anthropic.Anthropic() as client, acting_as(gateway, "writer"):
        assert WAYS["create"](client) == "from the gateway"
        assert WAYS["stream()"](client) == "from the gateway"


def test_other_requests_are_not_touched(gateway: ScriptedServer, elsewhere: ScriptedServer) -> None:
    with client_of(elsewhere) as client, acting_as(gateway, "writer") as scope:
        assert [model.id for model in client.models.list()] == ["scripted"]
    assert llm_spans(scope) == []
    assert gateway.requests == []


COUNTED = {"model": "claude", "messages": ASKED["messages"]}


async def test_tokens_are_counted_where_the_calls_go(
    gateway: ScriptedServer, elsewhere: ScriptedServer
) -> None:
    client, other = client_of(elsewhere), async_client_of(elsewhere)
    with acting_as(gateway, "writer") as scope:
        client.messages.count_tokens(**COUNTED)
        client.messages.with_raw_response.count_tokens(**COUNTED)
        await other.beta.messages.count_tokens(**COUNTED)
        assert not scope.recorder.has_called
        assert llm_spans(scope) == []
    for request in gateway.requests:
        assert request.path == "/v1/messages/count_tokens"
        assert request.body == COUNTED
        assert request.headers["authorization"] == "Bearer token-1"
        assert request.headers[c.HEADER_AGENT] == "writer"
        assert "app-key" not in request.headers.values()
    assert (len(gateway.requests), elsewhere.requests) == (3, [])
    with acting_as(gateway, "checker") as scope:  # which no policy answers
        client.messages.count_tokens(**COUNTED)
    assert llm_spans(scope) == []
    assert [request.path for request in elsewhere.requests] == ["/v1/messages/count_tokens"]
    client.messages.count_tokens(**COUNTED)  # outside every attempt
    assert (len(gateway.requests), len(elsewhere.requests)) == (3, 2)
    client.close()
    await other.close()


FILES: dict[str, Any] = {
    "Path": lambda path: path,
    "file": lambda path: io.FileIO(path),
    "BytesIO": lambda path: io.BytesIO(path.read_bytes()),
}


@pytest.mark.parametrize("file", FILES)
async def test_files_and_iterators_that_the_sdk_reads(
    gateway: ScriptedServer, elsewhere: ScriptedServer, tmp_path: Path, file: str
) -> None:
    """Check that they are sent and recorded as their content, and read once."""
    data, path = b"\x89PNG\r\n\x1a\n...", tmp_path / "page.png"
    path.write_bytes(data)
    given: list[Any] = []

    def asked(content: Any) -> Iterator[dict[str, Any]]:
        source = {"type": "base64", "media_type": "image/png", "data": content}
        yield {"role": "user", "content": [{"type": "image", "source": source}]}

    def request() -> dict[str, Any]:
        given.append(FILES[file](path))
        return {**ASKED, "messages": asked(given[-1])}

    with acting_as(gateway, "writer"), client_of(elsewhere) as client:
        client.messages.create(**request())
    with acting_as(None, "checker") as scope, client_of(elsewhere) as client:
        scope.recorder.images = {}
        client.messages.create(**request())
        async with async_client_of(elsewhere) as other:
            await other.messages.create(**request())
    for each in given if file == "file" else ():
        each.close()
    sent = list(asked(base64.b64encode(data).decode()))
    assert [r.messages for r in (*gateway.requests, *elsewhere.requests)] == [sent] * 3
    digest = hashlib.sha256(data).hexdigest()
    assert [digests_in(span.attributes) for span in llm_spans(scope)] == [{digest}, {digest}]
    assert scope.recorder.images == {digest: Image.of(data, "image/png")}


# --- production -----------------------------------------------------------------------------


# --- installing -----------------------------------------------------------------------------


def test_an_sdk_that_cannot_be_wrapped_does_not_stop_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import openai

    from lightspan.capture.sdks import Sdk

    def broken(self: Sdk) -> Any:
        if self is OPENAI:
            raise ImportError("broken")
        return classes(self)

    classes = Sdk.wrapped_classes
    monkeypatch.setattr(Sdk, "wrapped_classes", broken)
    for _ in range(2):
        with pytest.raises(ImportError, match="broken"):
            sdk_instrumentation.install()
    assert "request" not in vars(openai.OpenAI)
    assert list(state.sdk_patches) == ["anthropic"]
    monkeypatch.setattr(Sdk, "wrapped_classes", classes)
    sdk_instrumentation.install()
    assert sorted(state.sdk_patches) == ["anthropic", "openai"]
