"""Test that a stream that is left or broken is recorded up to that point."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

import lightspan
from lightspan.production.feedback import Rated, feedback
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanStatus
from lightspan_testing.attempts import Recorded, read_recorded
from packages.core.tests.capture.streams import (
    ASKED as CHAT,
    api_of,
    chunk_of,
    client_that_gets,
    stopping,
)

ASKED: dict[str, Any] = {**CHAT["chat"], "stream": True}


def take_two(stream: Any) -> str:
    """Read two words of the stream, and return the response's id."""
    answer = ""
    for chunk in stream:
        answer += chunk.choices[0].delta.content or ""
        if answer == "one two":
            return str(chunk.id)
    raise AssertionError(answer)


def _dropped(client: openai.OpenAI) -> str:
    found = take_two(client.chat.completions.create(**ASKED))
    gc.collect()
    return found


def _closed_later(client: openai.OpenAI) -> str:
    """Close a stream after the end of its operation; the attempt ends with the stream."""
    with lightspan.operation("handle"):
        stream = client.chat.completions.create(**ASKED)
        response_id = take_two(stream)
    stream.close()
    return response_id


WAYS: dict[str, Callable[[openai.OpenAI], str]] = {
    "dropped": _dropped,
    "closed after its attempt": _closed_later,
}


def check(found: Recorded, response_id: str, url: str) -> None:
    [call] = found.calls
    assert call.attributes[c.CALL_OUTCOME] == "cancelled"
    assert call.attributes[c.RESPONSE_ID] == response_id
    assert c.FINISH_REASONS not in call.attributes
    assert (call.status, call.status_message, call.late) == (SpanStatus.UNSET, "", False)
    assert found.answered == [("hi", "one two")]
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])
    rated = feedback(response_id, 0.5, store=url)
    assert rated == Rated(found.attempt.attempt_id, str(call.attributes[c.CALL_ID]))


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_is_left(url: str, way: str) -> None:
    with (
        stopping("chat") as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        record(url),
    ):
        response_id = WAYS[way](client)
    [found] = read_recorded(url)
    check(found, response_id, url)


def test_a_stream_that_is_open_when_recording_ends(url: str) -> None:
    with stopping("chat") as server, openai.OpenAI(base_url=server.url, api_key="k") as client:
        with record(url), lightspan.operation("handle"):
            stream = client.chat.completions.create(**ASKED)
            response_id = take_two(stream)
        stream.close()
    [found] = read_recorded(url)
    check(found, response_id, url)


def test_a_stream_that_times_out(url: str) -> None:
    with (
        stopping("chat") as server,
        openai.OpenAI(base_url=server.url, api_key="k", timeout=0.5, max_retries=0) as client,
        record(url),
    ):
        stream = client.chat.completions.create(**ASKED)
        response_id = take_two(stream)
        with pytest.raises(openai.APITimeoutError):
            next(stream)
    [found] = read_recorded(url)
    [call] = found.calls
    assert call.attributes[c.CALL_OUTCOME] == "error"
    assert found.answered == [("hi", "one two")]
    assert (found.attempt.status, found.attempt.outcome) == ("failed", "app_error")
    assert feedback(response_id, 0.0, store=url).attempt_id == found.attempt.attempt_id


# --- streams that the server cuts off -------------------------------------------------------
def _events(*events: dict[str, Any]) -> bytes:
    lines = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    return "".join(lines).encode()


_HEAD: dict[str, Any] = {"id": "r1", "object": "response", "model": "m", "output": []}
_TEXT: dict[str, Any] = {"output_index": 0, "content_index": 0, "item_id": "i", "delta": "one two"}
_MESSAGE: dict[str, Any] = {"id": "m1", "type": "message", "role": "assistant", "model": "c"}
_USED = {"input_tokens": 1, "output_tokens": 1}
_DELTA = {"type": "text_delta", "text": "one two"}
CUT: dict[str, bytes] = {
    "chat": chunk_of({"content": "one "}) + chunk_of({"content": "two"}),
    "responses": _events(
        {"type": "response.created", "sequence_number": 0, "response": _HEAD},
        {"type": "response.output_text.delta", "sequence_number": 1, "logprobs": [], **_TEXT},
    ),
}
CUT_MESSAGE = _events(
    {"type": "message_start", "message": {**_MESSAGE, "content": [], "usage": _USED}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": _DELTA},
)


def _read(client: openai.OpenAI, api: str) -> None:
    list(api_of(client, api).create(**CHAT[api], stream=True))


def _read_parsed(client: openai.OpenAI, api: str) -> None:
    raw = api_of(client, api).with_raw_response.create(**CHAT[api], stream=True)
    list(raw.parse())


def _read_lines(client: openai.OpenAI, api: str) -> None:
    method = api_of(client, api).with_streaming_response.create
    with method(**CHAT[api], stream=True) as response:
        list(response.iter_lines())


READERS = {"chunks": _read, "parsed": _read_parsed, "lines": _read_lines}


def check_cut(url: str) -> None:
    [found] = read_recorded(url)
    [call] = found.calls
    assert (call.attributes[c.CALL_OUTCOME], call.status) == ("error", SpanStatus.ERROR)
    assert "no finish reason" in call.status_message
    assert c.FINISH_REASONS not in call.attributes
    assert [call.answer for call in found.answered] == ["one two"]
    assert found.attempt.status == "failed"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("api", CUT)
def test_a_stream_that_the_server_cuts_off(url: str, api: str, reader: str) -> None:
    with client_that_gets(iter([CUT[api]])) as client, record(url):
        READERS[reader](client, api)
    check_cut(url)


def test_a_message_that_the_server_cuts_off(url: str) -> None:
    source: Any = client_that_gets(iter([CUT_MESSAGE]))._client._transport
    with (
        anthropic.Anthropic(
            base_url="http://127.0.0.1:9",
            api_key="k",
            http_client=anthropic.DefaultHttpxClient(transport=source),
        ) as client,
        record(url),
    ):
        asked: Any = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        list(client.messages.create(model="c", stream=True, **asked))
    check_cut(url)


@pytest.mark.parametrize("reader", READERS)
def test_a_server_that_ends_its_stream_without_a_finish_reason(url: str, reader: str) -> None:
    content = CUT["chat"] + b"data: [DONE]\n\n"
    with client_that_gets(iter([content])) as client, record(url):
        READERS[reader](client, "chat")
    [found] = read_recorded(url)
    assert found.calls[0].attributes[c.CALL_OUTCOME] == "ok"
    assert found.attempt.status == "succeeded"
