"""Conformance tests of chat engines: subclass `ChatEngineSuite` and implement `make_engine`.

    class TestMyEngine(ChatEngineSuite):
        def make_engine(self, url):
            return MyEngine(url)

The endpoint is a real server (`lightspan_testing.scripted`). An engine may set the model and the
sampling parameters in a request. It must send the rest of the body unchanged. Needs pytest and
pytest-asyncio (`asyncio_mode = "auto"`). No test depends on time.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final

import pytest

from lightspan.errors import EngineClosedError, EngineError
from lightspan.schema.genai_attributes import END
from lightspan_gateway.chat_engine import ChatAnswer, ChatEngine, EndpointRefused
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall

BODY: Final[Mapping[str, Any]] = {
    "model": "asked",
    "messages": [{"role": "user", "content": "naïve 日本語 🙂"}],
    "tools": [{"type": "function", "function": {"name": "calculator", "parameters": {}}}],
    "x_unknown": {"kept": [1, None]},
}
CALLS: Final = 16
RETRY_TIMEOUT_S: Final = 30.0
"""Seconds until the scripted server stops waiting. A test that takes so long has failed."""

TEXTS: Final = {
    "plain": "a b c",
    "empty": "",
    "unicode": "naïve 日本語 🙂 \u2028 \x85 \r\n\r\n",
    "like an event": "data: [DONE]\n\ndata: {}\n\n",
    "long": "word " * 4 + "y" * 300_000,
}
REPLIES: Final = {
    **{name: [Reply(text=text)] for name, text in TEXTS.items()},
    "tool call": [Reply(tool_calls=[ToolCall(name="calculator", arguments='{"x": 1}')])],
    "malformed tool call": [
        Reply(text="so", tool_calls=[ToolCall(name="calculator", arguments='{"x": ')])
    ],
    "cut": [Reply(text="a b", finish_reason="length")],
    "several choices": [Reply(text="one"), Reply(text="two 2"), Reply(text="three")],
}
"""Name → one reply for each choice."""

Content = list[tuple[str, list[tuple[str, str]], str]]
"""Text, tool calls (name, arguments) and finish reason of each choice."""


def content_of(answer: ChatAnswer) -> Content:
    """Return the content of an answer that was not streamed."""
    assert answer.status == 200
    return [
        (
            choice["message"]["content"] or "",
            [_named(call) for call in choice["message"].get("tool_calls", ())],
            choice["finish_reason"],
        )
        for choice in json.loads(answer.body)["choices"]
    ]


async def read_stream(engine: ChatEngine, body: Mapping[str, Any] = BODY) -> list[dict[str, Any]]:
    """Return the decoded payloads of a streamed call, without an end mark."""
    payloads = [payload async for payload in engine.stream({**body, "stream": True})]
    return [json.loads(payload) for payload in payloads if payload != END.encode()]


def merge_chunks(chunks: list[dict[str, Any]]) -> Content:
    """Return the content of a streamed answer."""
    choices: dict[int, tuple[str, list[tuple[str, str]], str]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text, calls, finish = choices.get(choice["index"], ("", [], ""))
        text += choice["delta"].get("content") or ""
        calls += [_named(call) for call in choice["delta"].get("tool_calls", ())]
        choices[choice["index"]] = text, calls, finish + (choice["finish_reason"] or "")
    return [choices[index] for index in sorted(choices)]


def _named(call: Mapping[str, Any]) -> tuple[str, str]:
    return call["function"]["name"], call["function"]["arguments"]


async def ask(engine: ChatEngine, *, stream: bool, content: str = "hi") -> Content:
    """Make a call with the user message `content`, and return the content of the answer."""
    body = {**BODY, "messages": [{"role": "user", "content": content}]}
    return (
        merge_chunks(await read_stream(engine, body))
        if stream
        else content_of(await engine.chat(body))
    )


class Held:
    """A script that answers with the last message of the request.

    If that message is `held`, the script waits before it answers, until the call is released.
    """

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self._released = threading.Event()

    def __call__(self, request: Request) -> Reply:
        if request.last_text == "held":
            self.begun.release()
            self._released.wait(RETRY_TIMEOUT_S)
        return Reply(text=request.last_text)

    async def wait_for_one(self) -> None:
        """Wait until the server holds a call."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=RETRY_TIMEOUT_S)

    @classmethod
    @contextmanager
    def server(cls) -> Iterator[tuple[Held, ScriptedServer]]:
        """Run a server with a `Held` script; release the held calls at the end."""
        held = cls()
        with ScriptedServer(held) as server:
            try:
                yield held, server
            finally:
                held._released.set()


class ChatEngineSuite:
    """Tests of a chat engine; the module's docstring shows how to subclass it."""

    def make_engine(self, url: str) -> ChatEngine:
        """Return an unstarted engine for the endpoint with the base URL `url` (`http://…/v1`)."""
        raise NotImplementedError

    @asynccontextmanager
    async def running(self, url: str) -> AsyncIterator[ChatEngine]:
        engine = self.make_engine(url)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_body_travels_whole_and_is_left_as_it_was(self, stream: bool) -> None:
        body = {**copy.deepcopy(dict(BODY)), "stream": stream}
        original = copy.deepcopy(body)
        with ScriptedServer([Reply(text="ok", headers={"X-Request-Id": "r1"})]) as server:
            async with self.running(server.url) as engine:
                assert isinstance(engine, ChatEngine)
                if stream:
                    await read_stream(engine, body)
                else:
                    headers = (await engine.chat(body)).headers
                    assert {key.lower(): headers[key] for key in headers}["x-request-id"] == "r1"
            [request] = server.requests
        assert body == original
        assert request.path.endswith("/v1/chat/completions")
        assert request.headers["content-type"].startswith("application/json")
        assert {**request.body, "model": "asked"} == original

    @pytest.mark.parametrize("name", REPLIES)
    async def test_streamed_or_not_the_answer_is_the_servers(self, name: str) -> None:
        replies = REPLIES[name]
        expected = []
        for reply in replies:
            calls = [(call.name, call.arguments) for call in reply.tool_calls]
            finish = reply.finish_reason or ("tool_calls" if calls else "stop")
            expected.append((reply.text or "", calls, finish))
        with ScriptedServer([replies, replies]) as server:
            async with self.running(server.url) as engine:
                whole = content_of(await engine.chat(BODY))
                parts = merge_chunks(await read_stream(engine))
        assert whole == parts == expected

    async def test_a_stream_is_passed_on_piece_by_piece(self) -> None:
        """Every chunk of the endpoint's stream is passed on, also the one with the token usage."""
        body = {**BODY, "stream_options": {"include_usage": True}}
        with ScriptedServer("a b c") as server:
            async with self.running(server.url) as engine:
                *chunks, last = await read_stream(engine, body)
        deltas = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert deltas == ["", "a", " b", " c", None]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)

    async def test_a_refusal_is_final_and_ends_nothing_else(self) -> None:
        """A call that the endpoint refuses with status 400 is not retried.

        Its error contains the endpoint's text, and the next call succeeds.
        """
        refusal = Reply(status=400, text="no such thing")
        with ScriptedServer([refusal, refusal, "fine", "fine"]) as server:
            async with self.running(server.url) as engine:
                answer = await engine.chat(BODY)
                with pytest.raises(EndpointRefused, match="no such thing") as caught:
                    await read_stream(engine)
                assert len(server.requests) == 2
                for stream in (False, True):
                    assert await ask(engine, stream=stream) == [("fine", [], "stop")]
        assert (answer.status, caught.value.status) == (400, 400)
        assert json.loads(answer.body)["error"]["message"] == "no such thing"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_endpoint_that_is_gone_is_named(self, stream: bool) -> None:
        with ScriptedServer() as server:
            pass
        async with self.running(server.url) as engine:
            with pytest.raises(EngineError, match=server.origin):
                await ask(engine, stream=stream)

    async def test_an_endpoint_that_breaks_off(self) -> None:
        """If the endpoint breaks off a stream, the call fails.

        The chunks before the break are passed on.
        """
        with ScriptedServer(lambda request: Reply(text="a b c", drop=True)) as server:
            async with self.running(server.url) as engine:
                with pytest.raises(EngineError):
                    await engine.chat(BODY)
                payloads = engine.stream({**BODY, "stream": True})
                assert b"assistant" in await anext(payloads)
                with pytest.raises(EngineError):
                    await anext(payloads)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_many_at_once(self, stream: bool) -> None:
        """Calls run concurrently.

        The test's server waits for all of them before it answers any.
        """
        everyone = threading.Barrier(CALLS)

        def answer(request: Request) -> str:
            everyone.wait(RETRY_TIMEOUT_S)
            return request.last_text

        questions = [f"question {number}" for number in range(CALLS)]
        with ScriptedServer(answer) as server:
            async with self.running(server.url) as engine:
                calls = [ask(engine, stream=stream, content=question) for question in questions]
                answers = await asyncio.gather(*calls)
        assert answers == [[(question, [], "stop")] for question in questions]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_cancelled_call_ends_nothing_else(self, stream: bool) -> None:
        with Held.server() as (held, server):
            async with self.running(server.url) as engine:
                task = asyncio.create_task(ask(engine, stream=stream, content="held"))
                await held.wait_for_one()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert await ask(engine, stream=stream) == [("hi", [], "stop")]

    async def test_a_closed_stream_ends_nothing_else(self) -> None:
        with ScriptedServer("a b c") as server:
            async with self.running(server.url) as engine:
                stream = engine.stream({**BODY, "stream": True})
                async with aclosing(stream) as payloads:  # type: ignore[type-var]
                    await anext(payloads)
                assert await ask(engine, stream=True) == [("a b c", [], "stop")]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_closing_ends_what_is_in_flight(self, stream: bool) -> None:
        with Held.server() as (held, server):
            async with self.running(server.url) as engine:
                task = asyncio.create_task(ask(engine, stream=stream, content="held"))
                await held.wait_for_one()
                await engine.close()
                with pytest.raises(EngineError):
                    await task

    @pytest.mark.parametrize("stream", [False, True])
    async def test_it_answers_only_while_it_is_open(self, stream: bool) -> None:
        with ScriptedServer("ok") as server:
            engine = self.make_engine(server.url)
            with pytest.raises(EngineClosedError):
                await ask(engine, stream=stream)
            await engine.start()
            assert await ask(engine, stream=stream) == [("ok", [], "stop")]
            await engine.close()
            await engine.close()
            with pytest.raises(EngineClosedError):
                await ask(engine, stream=stream)
            assert len(server.requests) == 1
