"""Test that a stream that is left or broken is recorded up to that point."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import openai
import pytest

import lightspan
from lightspan.production.feedback import Rated, feedback
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanStatus
from lightspan_testing.attempts import Recorded, read_recorded
from packages.core.tests.capture.streams import ASKED as CHAT, stopping

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
