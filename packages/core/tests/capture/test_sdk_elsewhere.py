"""Calls that are not ours: what reaches other endpoints, and what is recorded."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from typing import Any

import openai
import pytest

from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import input_messages_of, output_messages_of
from lightspan.schema.spans import SpanStatus
from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from lightspan_testing.wait import until
from packages.core.tests.capture.clients import (
    MESSAGES,
    WAYS,
    acting_as,
    async_client_of,
    client_of,
    llm_spans,
)

pytestmark = pytest.mark.usefixtures("unwrapped")


@pytest.mark.parametrize("stream", [False, True])
def test_another_agents_request_is_what_it_would_have_been(
    gateway: ScriptedServer, elsewhere: ScriptedServer, stream: bool
) -> None:
    options = {"default_headers": {"x-mine": "1"}, "default_query": {"q": "1"}}
    way = WAYS["stream=True" if stream else "create"]
    with client_of(elsewhere, **options) as client:
        way(client)
        with acting_as(gateway, "checker"):
            way(client)
    plain, shimmed = elsewhere.requests
    assert plain == shimmed
    assert plain.headers["authorization"] == "Bearer app-key"


@pytest.mark.parametrize("stream", [False, True])
def test_another_agents_call_is_recorded(gateway: ScriptedServer, stream: bool) -> None:
    call = ToolCall(name="f", arguments='{"a": 1}', call_id="call_7")
    with (
        ScriptedServer([Reply(text="hello there", tool_calls=[call])], model="m") as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "temperature": 0.5, "n": 1}
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
            for _ in client.chat.completions.create(**asked):
                pass
        else:
            client.chat.completions.create(**asked)
        [span] = llm_spans(scope)
    known = dict(span.attributes)
    assert known.pop(c.CALL_ID)
    assert str(known.pop(c.RESPONSE_ID)).startswith("chatcmpl-")
    assert json.loads(str(known.pop(c.INPUT_MESSAGES))) == [
        {"role": "user", "parts": [{"type": "text", "content": "hi"}]}
    ]
    assert json.loads(str(known.pop(c.OUTPUT_MESSAGES))) == [
        {
            "role": "assistant",
            "parts": [
                {"type": "text", "content": "hello there"},
                {"type": "tool_call", "id": "call_7", "name": "f", "arguments": '{"a": 1}'},
            ],
            "finish_reason": "tool_calls",
        }
    ]
    if stream:
        assert known.pop(c.REQUEST_STREAM) is True
    address = f"http://{known.pop(c.SERVER_ADDRESS)}:{known.pop(c.SERVER_PORT)}"
    assert address == server.origin
    assert known == {
        c.AGENT_PATH: "checker",
        c.ROUTE: "app",
        c.CALL_OUTCOME: "ok",
        c.OPERATION_NAME: "chat",
        c.OPENINFERENCE_KIND: "LLM",
        c.REQUEST_MODEL: "m",
        c.REQUEST_TEMPERATURE: 0.5,
        c.REQUEST_CHOICES: 1,
        c.RESPONSE_MODEL: "m",
        c.INPUT_TOKENS: 1,
        c.OUTPUT_TOKENS: 2,
        c.FINISH_REASONS: ["tool_calls"],
    }
    assert (span.name, span.status, span.sequence_start) == ("chat m", SpanStatus.OK, None)


def test_another_agents_picture_is_sent_and_kept_as_a_reference(
    gateway: ScriptedServer, elsewhere: ScriptedServer
) -> None:
    picture = b"\x89PNG" * 2**18
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    part: Any = {"type": "image_url", "image_url": {"url": url}}
    with client_of(elsewhere) as client, acting_as(gateway, "checker") as scope:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
        [span] = llm_spans(scope)
    assert elsewhere.requests[0].messages[0]["content"] == [part]
    kept = {
        "type": "blob",
        "modality": "image",
        "mime_type": "image/png",
        "size": len(picture),
        "sha256": hashlib.sha256(picture).hexdigest(),
    }
    assert json.loads(str(span.attributes[c.INPUT_MESSAGES])) == [{"role": "user", "parts": [kept]}]


def test_another_agents_error_is_recorded(gateway: ScriptedServer) -> None:
    with (
        ScriptedServer([Reply(status=400, text="bad temperature")]) as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        with pytest.raises(openai.BadRequestError, match="bad temperature"):
            WAYS["create"](client)
        [span] = llm_spans(scope)
    assert span.attributes[c.CALL_OUTCOME] == "error"
    assert span.attributes[c.ERROR_TYPE] == "BadRequestError"
    assert "bad temperature" in span.status_message


async def test_another_agents_cancelled_call(gateway: ScriptedServer) -> None:
    with ScriptedServer([Reply(delay_s=0.2, text="late")]) as server:
        async with async_client_of(server) as client:
            with acting_as(gateway, "checker") as scope:
                task = asyncio.create_task(
                    client.chat.completions.create(model="m", messages=MESSAGES)
                )
                await until(lambda: server.requests)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            [span] = llm_spans(scope)
            assert span.attributes[c.CALL_OUTCOME] == "cancelled"


def test_a_key_that_is_echoed_is_not_kept(
    gateway: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the app's messages, by the model's text and in a tool call."""
    monkeypatch.setenv("DESK_API_KEY", "desk-7f3a9b-11aa22")
    calls = [ToolCall(name="log", arguments='{"key":"desk-7f3a9b-11aa22"}')]
    asked: Any = [{"role": "user", "content": "Is desk-7f3a9b-11aa22 the key?"}]
    with (
        ScriptedServer([Reply(text="It is desk-7f3a9b-11aa22.", tool_calls=calls)]) as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        got = client.chat.completions.create(model="m", messages=asked)
    assert got.choices[0].message.content == "It is desk-7f3a9b-11aa22."
    [span] = llm_spans(scope)
    assert input_messages_of(span.attributes) == [{"role": "user", "content": "Is <key> the key?"}]
    [answered] = output_messages_of(span.attributes)
    assert answered["content"] == "It is <key>."
    assert answered["tool_calls"][0]["function"]["arguments"] == '{"key":"<key>"}'
    assert "desk-7f3a9b-11aa22" not in repr(span)
