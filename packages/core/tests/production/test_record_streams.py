"""Streams of a recorded app, left or broken in the middle: what was seen of them is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

import lightspan
from lightspan.production.feedback import Rated, feedback
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanStatus
from lightspan_testing.attempts import Recorded, read_recorded
from lightspan_testing.scripted import Reply, ScriptedServer
from packages.core.tests.production.chat import USER

ASKED: dict[str, Any] = {"model": "m", "messages": USER, "stream": True}


@pytest.fixture
def stopping() -> Iterator[ScriptedServer]:
    """It says "one two" of three words."""
    ended = threading.Event()

    def before_chunk(number: int) -> None:
        if number == 3:
            ended.wait()

    with ScriptedServer(lambda _: Reply(text="one two three", before_chunk=before_chunk)) as server:
        yield server
        ended.set()


def take_two(stream: Any) -> str:
    """The response's id, when two words have come."""
    said = ""
    for chunk in stream:
        said += chunk.choices[0].delta.content or ""
        if said == "one two":
            return str(chunk.id)
    raise AssertionError(said)


def _closed(client: openai.OpenAI) -> str:
    with client.chat.completions.create(**ASKED) as stream:
        return take_two(stream)


def _dropped(client: openai.OpenAI) -> str:
    found = take_two(client.chat.completions.create(**ASKED))
    gc.collect()
    return found


def _of_a_streaming_response(client: openai.OpenAI) -> str:
    with client.chat.completions.with_streaming_response.create(**ASKED) as response:
        return take_two(response.parse())


def _helper(client: openai.OpenAI) -> str:
    asked = {name: value for name, value in ASKED.items() if name != "stream"}
    with client.chat.completions.stream(**asked) as stream:
        for event in stream:
            if event.type == "chunk" and event.snapshot.choices[0].message.content == "one two":
                return event.chunk.id
    raise AssertionError


WAYS: dict[str, Callable[[openai.OpenAI], str]] = {
    "closed": _closed,
    "dropped": _dropped,
    "streaming response": _of_a_streaming_response,
    "stream()": _helper,
}


def check(found: Recorded, response_id: str, url: str) -> None:
    [call] = found.calls
    assert call.attributes[c.CALL_OUTCOME] == "cancelled"
    assert call.attributes[c.RESPONSE_ID] == response_id
    assert c.FINISH_REASONS not in call.attributes
    assert (call.status, call.status_message, call.late) == (SpanStatus.UNSET, "", False)
    assert found.answered == [("hello", "one two")]
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])
    rated = feedback(response_id, 0.5, store=url)
    assert rated == Rated(found.attempt.attempt_id, str(call.attributes[c.CALL_ID]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", [False, True])
def test_a_stream_that_is_left(stopping: ScriptedServer, url: str, way: str, around: bool) -> None:
    with openai.OpenAI(base_url=stopping.url, api_key="k") as client, record(url):
        if around:
            with lightspan.operation("handle"):
                response_id = WAYS[way](client)
        else:
            response_id = WAYS[way](client)
    [found] = read_recorded(url)
    check(found, response_id, url)


def test_a_stream_that_is_open_when_its_attempt_ends(stopping: ScriptedServer, url: str) -> None:
    """The attempt waits for it, so nothing of it comes late."""
    with openai.OpenAI(base_url=stopping.url, api_key="k") as client, record(url):
        with lightspan.operation("handle"):
            stream = client.chat.completions.create(**ASKED)
            response_id = take_two(stream)
        stream.close()
    [found] = read_recorded(url)
    check(found, response_id, url)


def test_a_stream_that_is_open_when_recording_ends(stopping: ScriptedServer, url: str) -> None:
    with openai.OpenAI(base_url=stopping.url, api_key="k") as client:
        with record(url), lightspan.operation("handle"):
            stream = client.chat.completions.create(**ASKED)
            response_id = take_two(stream)
        stream.close()
    [found] = read_recorded(url)
    check(found, response_id, url)


async def test_async_streams_that_are_left(stopping: ScriptedServer, url: str) -> None:
    async def take(stream: Any) -> str:
        said = ""
        async for chunk in stream:
            said += chunk.choices[0].delta.content or ""
            if said == "one two":
                return str(chunk.id)
        raise AssertionError(said)

    async with openai.AsyncOpenAI(base_url=stopping.url, api_key="k") as client:
        api = client.chat.completions
        with record(url) as made:
            async with await api.create(**ASKED) as stream:
                ids = [await take(stream)]
            async with api.with_streaming_response.create(**ASKED) as response:
                ids.append(await take(await response.parse()))
            assert await asyncio.to_thread(made.flush)
    found = await asyncio.to_thread(read_recorded, url)
    for one, response_id in zip(found, ids, strict=True):
        await asyncio.to_thread(check, one, response_id, url)


def test_a_stream_that_times_out(stopping: ScriptedServer, url: str) -> None:
    with (
        openai.OpenAI(base_url=stopping.url, api_key="k", timeout=0.5, max_retries=0) as client,
        record(url),
    ):
        stream = client.chat.completions.create(**ASKED)
        response_id = take_two(stream)
        with pytest.raises(openai.APITimeoutError):
            next(stream)
    [found] = read_recorded(url)
    [call] = found.calls
    assert call.attributes[c.CALL_OUTCOME] == "error"
    assert found.answered == [("hello", "one two")]
    assert (found.attempt.status, found.attempt.outcome) == ("failed", "app_error")
    assert feedback(response_id, 0.0, store=url).attempt_id == found.attempt.attempt_id
