"""Test the spans of calls that go to the app's own endpoint, read to the end or not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import openai
import pytest

from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import input_messages_of, output_messages_of
from lightspan.schema.spans import SpanStatus
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall
from lightspan_testing.wait import until
from packages.core.tests.capture.clients import (
    MESSAGES,
    WAYS,
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
"""Usage of the prompt "hi" and the answer "from elsewhere"."""


# --- its request and its span -------------------------------------------------------------
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
    more: dict[str, Any] = {"temperature": 0.5, "n": 1}
    if stream:
        more |= {"stream": True, "stream_options": {"include_usage": True}}
    with (
        ScriptedServer([Reply(text="hello there", tool_calls=[call])], model="m") as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        answer: Any = client.chat.completions.create(**ASKED["chat"], **more)
        if stream:
            list(answer)
        [span] = llm_spans(scope)
    where = span.attributes
    assert f"http://{where[c.SERVER_ADDRESS]}:{where[c.SERVER_PORT]}" == server.origin
    assert where[c.OPERATION_NAME] == "chat"
    assert where.get(c.REQUEST_STREAM, False) is stream
    assert str(where[c.CALL_ID]).startswith("call-")
    assert said_of(span) == {
        c.CALL_OUTCOME: "ok",
        c.REQUEST_TEMPERATURE: 0.5,
        c.REQUEST_CHOICES: 1,
        c.RESPONSE_ID: "chatcmpl",
        c.RESPONSE_MODEL: "m",
        **COUNTED,
        c.FINISH_REASONS: ["tool_calls"],
        c.OUTPUT_MESSAGES: [
            {
                "role": "assistant",
                "parts": [
                    {"type": "text", "content": "hello there"},
                    {"type": "tool_call", "id": "call_7", "name": "f", "arguments": '{"a": 1}'},
                ],
                "finish_reason": "tool_calls",
            }
        ],
    }
    assert (span.name, span.status, span.sequence_start) == ("chat m", SpanStatus.OK, None)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", ["mapping", "object", "text", "response", "own model"])
def test_an_answer_of_a_type_that_the_app_chooses(
    elsewhere: ScriptedServer, api: str, kind: str
) -> None:
    class Own(openai.BaseModel):
        id: str

    with client_of(elsewhere) as client:
        http: Any = api_of(client, api).with_raw_response.create(**ASKED[api]).http_response
        types: dict[str, Any] = {"mapping": dict[str, Any], "object": object, "text": str}
        types |= {"response": type(http), "own model": Own}
        with acting_as(None, "checker") as scope:
            path = {"chat": "chat/completions"}.get(api, api)
            client.post(f"/{path}", body=ASKED[api], cast_to=types[kind])
            errors = scope.recorder.capture_errors()
            [span] = llm_spans(scope)
    recorded = said_of(span)
    assert errors == []
    assert (recorded[c.CALL_OUTCOME], recorded[c.OUTPUT_TOKENS]) == ("ok", 2)
    assert recorded[c.OUTPUT_MESSAGES][0]["parts"][0]["content"] == "from elsewhere"


@pytest.mark.parametrize("way", ["sync", "async", "stream"])
@pytest.mark.parametrize("errors", [0, 1, 2])
async def test_repetitions_of_a_request_are_counted(way: str, errors: int) -> None:
    """Check that the SDK's own retries are one call, whose record counts them."""
    busy = Reply(status=503, text="busy", headers={"retry-after-ms": "1"})
    replies: list[Any] = [*[busy] * errors, "hello"]
    with (
        ScriptedServer(replies * 2) as server,
        client_of(server, max_retries=2) as client,
        acting_as(None, "checker") as scope,
    ):
        async_client = async_client_of(server, max_retries=2)
        for _ in range(2):  # what one call counts is not added to the next
            if way == "async":
                await async_client.chat.completions.create(**ASKED["chat"])
            else:
                answer = client.chat.completions.create(**ASKED["chat"], stream=way == "stream")
                list(answer if way == "stream" else ())
        await async_client.close()
        spans = llm_spans(scope)
    assert [span.attributes.get(c.CALL_REPEATS, 0) for span in spans] == [errors] * 2
    assert [span.attributes[c.CALL_OUTCOME] for span in spans] == ["ok"] * 2


@pytest.mark.skipif(
    "content" not in inspect.signature(openai.OpenAI.post).parameters,
    reason="this version of the SDK encodes every body itself",
)
def test_a_body_that_the_app_encodes_is_recorded(elsewhere: ScriptedServer) -> None:
    headers = {"content-type": "application/json"}
    with client_of(elsewhere) as client, acting_as(None, "checker") as scope:
        content = json.dumps(ASKED["chat"]).encode()
        options = {"headers": headers}
        client.post("/chat/completions", content=content, cast_to=object, options=options)
        [span] = llm_spans(scope)
    assert said_of(span)[c.CALL_OUTCOME] == "ok"


RESPONSE: dict[str, Any] = {"id": "resp_1", "object": "response", "model": "m", "output": []}
FAILED = {**RESPONSE, "status": "failed", "error": {"code": "server_error", "message": "broken"}}


@pytest.mark.parametrize("way", ["whole", "raw", "stream", "raw stream", "200 with an error"])
def test_a_response_that_failed_is_an_error(way: str) -> None:
    """Check answers with status 200 that say that there is none."""
    body = json.dumps(FAILED).encode()
    if "stream" in way:
        event = {"type": "response.failed", "sequence_number": 1, "response": FAILED}
        body = f"event: response.failed\ndata: {json.dumps(event)}\n\n".encode()
    if way == "200 with an error":
        body = b'{"error": {"message": "broken", "code": 429}}'
    with client_that_gets(body) as client, acting_as(None, "checker") as scope:
        api: Any = client.responses.with_raw_response if "raw" in way else client.responses
        if way == "200 with an error":
            client.chat.completions.create(**ASKED["chat"])
        else:
            answer = api.create(**ASKED["responses"], stream="stream" in way)
            if "stream" in way:
                list(answer.parse() if "raw" in way else answer)
        [span] = llm_spans(scope)
        assert scope.recorder.capture_errors() == []
    assert (span.attributes[c.CALL_OUTCOME], "broken" in span.status_message) == ("error", True)


def test_a_response_in_the_background_damages_the_attempt() -> None:
    """Check that an answer that arrives by another request is not recorded as an empty one."""
    body = json.dumps({**RESPONSE, "status": "queued"}).encode()
    with client_that_gets(body) as client, acting_as(None, "checker") as scope:
        client.responses.create(**ASKED["responses"], background=True)
        [error] = scope.recorder.capture_errors()
    assert "its status is 'queued'" in error


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("body", [b'{"id": "x", "choices": []}', b"<html>", b"[]", b"{}"])
def test_an_answer_without_content_damages_the_attempt(body: bytes, raw: bool) -> None:
    with client_that_gets(body) as client, acting_as(None, "checker") as scope:
        if raw:
            client.chat.completions.with_raw_response.create(**ASKED["chat"])
        else:
            client.post("/chat/completions", body=ASKED["chat"], cast_to=str)
        [error] = scope.recorder.capture_errors()
        assert "the answer has no choices, output or content" in error
        assert len(llm_spans(scope)) == 1


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


def test_a_key_that_is_echoed_is_not_kept(
    gateway: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a key is removed from the app's messages, the model's text and a tool call."""
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


def test_a_stream_that_is_left_open(gateway: ScriptedServer) -> None:
    """Check that the call is recorded once, as cancelled, at the end of the attempt."""
    with stopping("chat") as server, client_of(server) as client:
        with acting_as(gateway, "checker") as scope:
            stream: Any = client.chat.completions.create(**ASKED["chat"], stream=True)
            _take_two(stream, word_of)
            scope.recorder.cancel_pending()
            [span] = llm_spans(scope)
        del stream
        gc.collect()
        assert llm_spans(scope) == []
    assert said_of(span) == saying("chat", "one two", "cancelled")


@pytest.mark.parametrize("name", ["writer", "checker"])
def test_a_call_under_way_when_the_attempt_ends(name: str) -> None:
    """Check a synchronous call of an app that ran past its time limit, at each of its endpoints."""
    arrived, released = threading.Event(), threading.Event()

    def wait(request: Request) -> str:
        arrived.set()
        assert released.wait(20)
        return "late"

    def ask(client: openai.OpenAI) -> str:
        return str(client.chat.completions.create(**ASKED["chat"]).choices[0].message.content)

    with (
        ScriptedServer(wait) as slow,
        client_of(slow, max_retries=0) as client,
        acting_as(slow, name) as scope,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(copy_context().run, ask, client)
        assert arrived.wait(20)
        scope.recorder.cancel_pending()
        [span] = llm_spans(scope)
        released.set()
        assert call.result() == "late"
        assert llm_spans(scope) == []
    assert scope.recorder.capture_errors() == []
    assert (span.attributes[c.CALL_OUTCOME], span.status) == ("cancelled", SpanStatus.UNSET)
    assert input_messages_of(span.attributes)[-1]["content"] == "hi"


# --- left at the end ------------------------------------------------------------------------
@pytest.mark.parametrize("api", APIS)
def test_who_leaves_at_the_finish_reason_has_the_answer(
    gateway: ScriptedServer, elsewhere: ScriptedServer, api: str
) -> None:
    def ends(data: dict[str, Any]) -> bool:
        if data.get("type") == "response.completed":
            return True
        return any(choice["finish_reason"] for choice in data.get("choices", ()))

    with client_of(elsewhere) as client, acting_as(gateway, "checker") as scope:
        with api_of(client, api).create(**ASKED[api], stream=True) as stream:
            assert any(ends(chunk.model_dump()) for chunk in stream)
        [span] = llm_spans(scope)
    assert said_of(span) == whole(api, streamed=True)


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


ONE = chunk_of({"role": "assistant", "content": "one"})
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
FAILURE = b'data: {"error": {"message": "out of memory"}}\n\n'
CHARACTER = chunk_of({"content": "\N{SNOWMAN}"})
CUT = CHARACTER.index("\N{SNOWMAN}".encode()) + 1
FINISHED = {c.FINISH_REASONS: ["stop"]}
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "remembered by a cache": (ONE + LAST, saying("chat", "one", "ok", **FINISHED)),
    "with pings of a proxy": (
        [b"event: ping\n\n", ONE, b"data: keep-alive\n\n", LAST, b"data: [DONE]\n\n"],
        saying("chat", "one", "ok", **FINISHED),
    ),
    "cut in a character": (
        [ONE, CHARACTER[:CUT], CHARACTER[CUT:], LAST],
        saying("chat", "one\N{SNOWMAN}", "ok", **FINISHED),
    ),
    "left in a character": ([ONE, CHARACTER[:CUT]], saying("chat", "one", "cancelled")),
    "that tells of an error": ([ONE, FAILURE], saying("chat", "one", "error")),
    "that tells a cache of an error": (ONE + FAILURE, saying("chat", "one", "error")),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body(gateway: ScriptedServer, kind: str) -> None:
    content, expected = BODIES[kind]
    body = content if isinstance(content, bytes) else iter(content)
    with client_that_gets(body) as client, acting_as(gateway, "checker") as scope:
        create = client.chat.completions.with_streaming_response.create
        with create(**ASKED["chat"], stream=True) as response:
            parts = response.iter_bytes()
            if kind == "left in a character":
                next(parts), next(parts)
            else:
                assert list(parts)
        [span] = llm_spans(scope)
    assert scope.recorder.capture_errors() == []
    answered = said_of(span)
    if expected[c.CALL_OUTCOME] == "error":
        assert "out of memory" in span.status_message
        answered = without_error(answered)
    assert answered == expected


# --- of the gateway -------------------------------------------------------------------------
@pytest.mark.parametrize("way", LEAVES)
def test_a_stream_of_the_gateway_that_the_app_leaves(elsewhere: ScriptedServer, way: str) -> None:
    """Check that the app's side records the call's end, because the gateway may notice it too
    late.
    """
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
