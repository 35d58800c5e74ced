"""What is recorded of an answer that the app takes piece by piece, whichever way, and leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanStatus
from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from lightspan_testing.wait import until
from packages.core.tests.capture.clients import (
    MESSAGES,
    acting_as,
    async_client_of,
    client_of,
    llm_spans,
    text_of_stream,
)
from packages.core.tests.capture.streams import (
    APIS,
    ASKED,
    api_of,
    chunk_of,
    client_that_gets,
    said_of,
    saying,
    stopping,
    without_error,
    word_of,
    word_of_line,
)

pytestmark = pytest.mark.usefixtures("unwrapped")

COUNTED = {c.INPUT_TOKENS: 1, c.OUTPUT_TOKENS: 2}
"""Of "hi", answered with "from elsewhere"."""


# --- whole, whichever way it is read --------------------------------------------------------
READS: dict[str, Callable[[Any], Any]] = {
    "iter_bytes": lambda response: b"".join(response.iter_bytes()),
    "iter_text": lambda response: "".join(response.iter_text()),
    "iter_lines": lambda response: list(response.iter_lines()),
    "iter_raw": lambda response: list(response.http_response.iter_raw()),
    "read": lambda response: response.read(),
    "text": lambda response: response.text(),
    "parse": lambda response: response.parse(),
}
ASYNC_ITERATORS = ("iter_bytes", "iter_text", "iter_lines", "iter_raw")


def parse_all(response: Any) -> list[Any]:
    return list(response.parse())


def whole(api: str, *, streamed: bool) -> dict[str, Any]:
    counted = {} if streamed and api != "responses" else COUNTED
    if counted and api == "completions":  # the scripted endpoint counts the words of messages
        counted = {**counted, c.INPUT_TOKENS: 0}
    return saying(api, "from elsewhere", "ok", **{c.FINISH_REASONS: ["stop"], **counted})


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("way", [*READS, "json"])
def test_what_passes_is_recorded(
    gateway: ScriptedServer, elsewhere: ScriptedServer, api: str, streamed: bool, way: str
) -> None:
    read = READS.get(way, lambda response: response.json())
    if streamed and way in ("json", "parse"):
        read = parse_all
    with client_of(elsewhere) as client:
        asked = {**ASKED[api], "stream": True} if streamed else ASKED[api]
        with api_of(client, api).with_streaming_response.create(**asked) as response:
            plain = read(response)
        with acting_as(gateway, "checker") as scope:
            with api_of(client, api).with_streaming_response.create(**asked) as response:
                seen = read(response)
            [span] = llm_spans(scope)
    assert scope.recorder.capture_errors() == []
    assert type(seen) is type(plain)
    assert said_of(span) == whole(api, streamed=streamed)
    assert (span.status, span.status_message) == (SpanStatus.OK, "")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("way", [*ASYNC_ITERATORS, "read", "json", "parse"])
async def test_what_passes_asynchronously_is_recorded(
    gateway: ScriptedServer, elsewhere: ScriptedServer, api: str, streamed: bool, way: str
) -> None:
    async with async_client_of(elsewhere) as client:
        asked = {**ASKED[api], "stream": True} if streamed else ASKED[api]
        with acting_as(gateway, "checker") as scope:
            async with api_of(client, api).with_streaming_response.create(**asked) as response:
                if way == "iter_raw":
                    assert [part async for part in response.http_response.aiter_raw()]
                elif way in ASYNC_ITERATORS:
                    assert [part async for part in getattr(response, way)()]
                elif streamed and way != "read":
                    assert [chunk async for chunk in await response.parse()]
                else:
                    assert await getattr(response, way)()
            [span] = llm_spans(scope)
    assert scope.recorder.capture_errors() == []
    assert said_of(span) == whole(api, streamed=streamed)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("way", ["iter_raw", "iter_lines", "parse"])
def test_a_compressed_answer(gateway: ScriptedServer, streamed: bool, way: str) -> None:
    with (
        ScriptedServer([Reply(text="from elsewhere", compressed=True)]) as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        asked = {**ASKED["chat"], "stream": True} if streamed else ASKED["chat"]
        with client.chat.completions.with_streaming_response.create(**asked) as response:
            assert response.headers["content-encoding"] == "gzip"
            (parse_all if streamed and way == "parse" else READS[way])(response)
        [span] = llm_spans(scope)
    assert said_of(span) == whole("chat", streamed=streamed)


@pytest.mark.parametrize("again", ["parse", "lines"])
def test_an_answer_that_is_taken_twice_is_recorded_once(
    gateway: ScriptedServer, elsewhere: ScriptedServer, again: str
) -> None:
    with client_of(elsewhere) as client, acting_as(gateway, "checker") as scope:
        create = client.chat.completions.with_streaming_response.create
        with create(**ASKED["chat"], stream=True) as raw:
            stream = raw.parse()
            if again == "parse":
                assert raw.parse() is stream
                assert text_of_stream(stream) == "from elsewhere"
            else:
                assert len(list(raw.iter_lines())) > 2
        [span] = llm_spans(scope)
    assert said_of(span) == whole("chat", streamed=True)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_answers_from_memory(gateway: ScriptedServer, streamed: bool) -> None:
    """As caches do: its response has been read before the app gets it."""
    said = {"role": "assistant", "content": "remembered"}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    body = json.dumps({"id": "chatcmpl-1", "model": "m", "choices": [choice]}).encode()
    content = chunk_of(said, "stop") + b"data: [DONE]\n\n" if streamed else body
    with client_that_gets(content) as client, acting_as(gateway, "checker") as scope:
        asked = {**ASKED["chat"], "stream": streamed}
        with client.chat.completions.with_streaming_response.create(**asked) as response:
            assert response.read() == content
        [span] = llm_spans(scope)
    finished = {c.FINISH_REASONS: ["stop"]}
    assert said_of(span) == saying("chat", "remembered", "ok", **finished)


# --- left in the middle ---------------------------------------------------------------------
def _take_two(chunks: Any, word: Callable[[Any], str]) -> None:
    taken = ""
    for chunk in chunks:
        taken += word(chunk)
        if taken == "one two":
            return
    raise AssertionError("it was not left in the middle")


def _closed(api: Any, asked: dict[str, Any]) -> None:
    stream = api.create(**asked, stream=True)
    _take_two(stream, word_of)
    stream.close()


def _raw_closed(api: Any, asked: dict[str, Any]) -> None:
    raw = api.with_raw_response.create(**asked, stream=True)
    _take_two(raw.parse(), word_of)
    raw.http_response.close()


def _raw_lines(api: Any, asked: dict[str, Any]) -> None:
    raw = api.with_raw_response.create(**asked, stream=True)
    _take_two(raw.http_response.iter_lines(), word_of_line)
    raw.http_response.close()


def _lines(api: Any, asked: dict[str, Any]) -> None:
    with api.with_streaming_response.create(**asked, stream=True) as response:
        _take_two(response.iter_lines(), word_of_line)


def _parsed(api: Any, asked: dict[str, Any]) -> None:
    with api.with_streaming_response.create(**asked, stream=True) as response:
        _take_two(response.parse(), word_of)


def _by_an_error(api: Any, asked: dict[str, Any]) -> None:
    with contextlib.suppress(ZeroDivisionError), api.create(**asked, stream=True) as stream:
        _take_two(stream, word_of)
        raise ZeroDivisionError


LEAVES = {
    "close()": _closed,
    "raw, close()": _raw_closed,
    "raw, lines": _raw_lines,
    "streaming response, lines": _lines,
    "streaming response, parse()": _parsed,
    "with, by an error of the app": _by_an_error,
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("way", LEAVES)
def test_a_stream_that_the_app_leaves(gateway: ScriptedServer, api: str, way: str) -> None:
    with (
        stopping(api) as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        LEAVES[way](api_of(client, api), ASKED[api])
        [span] = llm_spans(scope)
        scope.recorder.cancel_pending()
        assert llm_spans(scope) == []
    assert scope.recorder.capture_errors() == []
    assert said_of(span) == saying(api, "one two", "cancelled")
    assert (span.status, span.status_message) == (SpanStatus.UNSET, "")


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("way", ["close()", "lines", "stream()", "another task"])
async def test_an_async_stream_that_the_app_leaves(
    gateway: ScriptedServer, api: str, way: str
) -> None:
    async def take_two(chunks: Any, word: Callable[[Any], str] = word_of) -> None:
        taken = ""
        async for chunk in chunks:
            taken += word(chunk)
            if taken.strip() == "one two":
                return
        raise AssertionError("it was not left in the middle")

    def helper_word(event: Any) -> str:
        kinds = ("content.delta", "response.output_text.delta")
        return str(event.delta) if event.type in kinds else ""

    with stopping(api) as server:
        async with async_client_of(server) as client:
            asks: Any = api_of(client, api)
            with acting_as(gateway, "checker") as scope:
                if way == "lines":
                    create = asks.with_streaming_response.create
                    async with create(**ASKED[api], stream=True) as response:
                        await take_two(response.iter_lines(), word_of_line)
                elif way == "stream()":
                    async with asks.stream(**ASKED[api]) as stream:
                        await take_two(stream, helper_word)
                else:
                    stream = await asks.create(**ASKED[api], stream=True)
                    await take_two(stream)
                    waiting = asyncio.create_task(anext(stream))
                    if way == "another task":
                        await asyncio.sleep(0)
                    await stream.close()
                    waiting.cancel()
                    await asyncio.wait([waiting])
                [span] = llm_spans(scope)
    assert scope.recorder.capture_errors() == []
    assert said_of(span) == saying(api, "one two", "cancelled")
    assert (span.status, span.status_message) == (SpanStatus.UNSET, "")


@pytest.mark.parametrize("way", ["stream", "lines"])
def test_a_stream_that_is_left_open(gateway: ScriptedServer, way: str) -> None:
    """The runner gives up at the end of the attempt."""
    with stopping("chat") as server, client_of(server) as client:
        asked = {**ASKED["chat"], "stream": True}
        with acting_as(gateway, "checker") as scope:
            if way == "stream":
                stream: Any = client.chat.completions.create(**asked)
                _take_two(stream, word_of)
            else:
                raw = client.chat.completions.with_raw_response.create(**asked)
                stream = raw.http_response.iter_lines()
                _take_two(stream, word_of_line)
            scope.recorder.cancel_pending()
            [span] = llm_spans(scope)
        del stream
        gc.collect()
        assert llm_spans(scope) == []
    assert said_of(span) == saying("chat", "one two", "cancelled")


@pytest.mark.parametrize("way", ["read", "left"])
def test_a_body_that_is_not_read(
    gateway: ScriptedServer, elsewhere: ScriptedServer, way: str
) -> None:
    with client_of(elsewhere) as client, acting_as(gateway, "checker") as scope:
        with client.chat.completions.with_streaming_response.create(**ASKED["chat"]) as response:
            if way == "read":
                next(response.iter_bytes())  # all of it, and it is left before it ends
        [span] = llm_spans(scope)
    expected = whole("chat", streamed=False)
    assert said_of(span) == (expected if way == "read" else {c.CALL_OUTCOME: "cancelled"})


def test_an_answer_cut_in_the_middle_of_a_tool_call(gateway: ScriptedServer) -> None:
    held = threading.Event()
    call = ToolCall(name="f", arguments='{"a": 1}', call_id="call_7")

    def before_chunk(number: int) -> None:
        if number == 4:  # `arguments.done`
            held.wait()

    reply = Reply(tool_calls=[call], before_chunk=before_chunk)
    with (
        ScriptedServer([reply]) as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        with client.responses.create(**ASKED["responses"], stream=True) as stream:
            for event in stream:
                if event.type == "response.function_call_arguments.delta":
                    break
        held.set()
        [span] = llm_spans(scope)
    called = {"type": "tool_call", "id": "call_7", "name": "f", "arguments": '{"a": 1}'}
    assert said_of(span) == {
        **saying("responses", "", "cancelled"),
        c.OUTPUT_MESSAGES: [{"role": "assistant", "parts": [called]}],
    }


# --- left at the end ------------------------------------------------------------------------
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("way", ["chunks", "lines"])
def test_who_leaves_at_the_finish_reason_has_the_answer(
    gateway: ScriptedServer, elsewhere: ScriptedServer, api: str, way: str
) -> None:
    def ends(data: dict[str, Any]) -> bool:
        if data.get("type") == "response.completed":
            return True
        return any(choice["finish_reason"] for choice in data.get("choices", ()))

    with client_of(elsewhere) as client, acting_as(gateway, "checker") as scope:
        asked = {**ASKED[api], "stream": True}
        if way == "chunks":
            with api_of(client, api).create(**asked) as stream:
                assert any(ends(chunk.model_dump()) for chunk in stream)
        else:
            with api_of(client, api).with_streaming_response.create(**asked) as response:
                lines = (line for line in response.iter_lines() if line.startswith("data: {"))
                assert any(ends(json.loads(line.removeprefix("data: "))) for line in lines)
        [span] = llm_spans(scope)
    assert said_of(span) == whole(api, streamed=True)


@pytest.mark.parametrize("taken", [1, 2])
def test_several_answers_are_complete_when_each_is(gateway: ScriptedServer, taken: int) -> None:
    with (
        ScriptedServer([["first", "second"]]) as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        ended = 0
        with client.chat.completions.create(**ASKED["chat"], stream=True, n=2) as stream:
            for chunk in stream:
                ended += chunk.choices[0].finish_reason is not None
                if ended == taken:
                    break
        [span] = llm_spans(scope)
    assert span.attributes[c.CALL_OUTCOME] == ("cancelled" if taken == 1 else "ok")
    assert span.attributes[c.FINISH_REASONS] == ["stop"] * taken


# --- ended by something else ----------------------------------------------------------------
def _break_off() -> None:
    raise ConnectionError


def _take_all(api: Any, asked: dict[str, Any], way: str) -> None:
    if way == "chunks":
        list(api.create(**asked, stream=True))
        return
    with api.with_streaming_response.create(**asked, stream=True) as response:
        list(response.iter_lines())


@pytest.mark.parametrize(
    ("api", "way"),
    [("chat", "chunks"), ("chat", "lines"), ("completions", "chunks"), ("responses", "chunks")],
)
@pytest.mark.parametrize("cause", ["timeout", "broken off"])
def test_a_stream_that_fails_in_the_middle(
    gateway: ScriptedServer, api: str, way: str, cause: str
) -> None:
    with (
        stopping(api, None if cause == "timeout" else _break_off) as server,
        client_of(server, timeout=0.5 if cause == "timeout" else 60, max_retries=0) as client,
        acting_as(gateway, "checker") as scope,
    ):
        with pytest.raises(Exception) as raised:
            _take_all(api_of(client, api), ASKED[api], way)
        [span] = llm_spans(scope)
    assert ("Timeout" in raised.typename) == (cause == "timeout")
    assert span.attributes[c.ERROR_TYPE] == raised.typename
    assert without_error(said_of(span)) == saying(api, "one two", "error")
    assert span.status is SpanStatus.ERROR


async def test_a_task_that_is_cancelled_in_the_middle(gateway: ScriptedServer) -> None:
    taken = ""

    async def take(client: openai.AsyncOpenAI) -> None:
        nonlocal taken
        async for chunk in await client.chat.completions.create(**ASKED["chat"], stream=True):
            taken += word_of(chunk)

    with stopping("chat") as server:
        async with async_client_of(server) as client:
            with acting_as(gateway, "checker") as scope:
                task = asyncio.create_task(take(client))
                await until(lambda: taken == "one two")
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                [span] = llm_spans(scope)
    assert span.attributes[c.ERROR_TYPE] == "CancelledError"
    assert without_error(said_of(span)) == saying("chat", "one two", "cancelled")


@pytest.mark.parametrize("way", ["chunks", "lines", "from memory"])
def test_an_error_that_the_stream_tells_of(gateway: ScriptedServer, way: str) -> None:
    first = chunk_of({"role": "assistant", "content": "one"})
    told = b'data: {"error": {"message": "out of memory"}}\n\n'
    content = first + told if way == "from memory" else iter([first, told])
    with client_that_gets(content) as client, acting_as(gateway, "checker") as scope:
        asked = {**ASKED["chat"], "stream": True}
        if way == "chunks":
            with pytest.raises(openai.APIError, match="out of memory"):
                list(client.chat.completions.create(**asked))
        else:
            with client.chat.completions.with_streaming_response.create(**asked) as response:
                list(response.iter_lines())
        [span] = llm_spans(scope)
    assert without_error(said_of(span)) == saying("chat", "one", "error")
    assert "out of memory" in span.status_message


def test_an_event_that_is_no_json_is_passed_over(gateway: ScriptedServer) -> None:
    """Such as a ping of a proxy."""
    said = chunk_of({"role": "assistant", "content": "one"})
    last = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
    content = iter([b"event: ping\n\n", said, b"data: keep-alive\n\n", last, b"data: [DONE]\n\n"])
    with client_that_gets(content) as client, acting_as(gateway, "checker") as scope:
        asked = {**ASKED["chat"], "stream": True}
        with client.chat.completions.with_streaming_response.create(**asked) as response:
            list(response.iter_lines())
        [span] = llm_spans(scope)
    assert scope.recorder.capture_errors() == []
    assert span.attributes[c.CALL_OUTCOME] == "ok"
    assert span.attributes[c.FINISH_REASONS] == ["stop"]


def test_a_stream_cut_in_the_middle_of_a_character(gateway: ScriptedServer) -> None:
    first, second = (chunk_of({"content": text}) for text in ("one", "\N{SNOWMAN}"))
    cut = second.index("\N{SNOWMAN}".encode()) + 1
    content = iter([first, second[:cut], second[cut:]])
    with client_that_gets(content) as client, acting_as(gateway, "checker") as scope:
        asked = {**ASKED["chat"], "stream": True}
        with client.chat.completions.with_streaming_response.create(**asked) as response:
            parts = response.iter_bytes()
            next(parts), next(parts)
        [span] = llm_spans(scope)
    assert scope.recorder.capture_errors() == []
    assert said_of(span) == saying("chat", "one", "cancelled")


# --- of the gateway -------------------------------------------------------------------------
@pytest.mark.parametrize("way", LEAVES)
def test_a_stream_of_the_gateway_that_the_app_leaves(elsewhere: ScriptedServer, way: str) -> None:
    """The gateway may notice when the attempt has been reported: the app's side says it in time."""
    with (
        stopping("chat") as gateway,
        client_of(elsewhere) as client,
        acting_as(gateway, "writer") as scope,
    ):
        LEAVES[way](client.chat.completions, {"model": "m", "messages": MESSAGES})
        [span] = llm_spans(scope)
    assert span.attributes[c.CALL_OUTCOME] == "cancelled"
    assert span.attributes[c.CALL_ID] == gateway.requests[0].headers[c.HEADER_CALL_ID]
    assert json.loads(str(span.attributes[c.OUTPUT_MESSAGES])) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "one two"}]}
    ]
