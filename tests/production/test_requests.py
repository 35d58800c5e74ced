"""Test requests of web servers (docs/guides/fastapi.md): middleware and left streams."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import openai
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import iterate_in_threadpool
from starlette.middleware import Middleware
from starlette.responses import StreamingResponse
from starlette.routing import Route

import lightspan
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan_testing.attempts import read_recorded
from packages.core.tests.production.chat import say


class Requests:
    """A middleware whose operation lasts until the response and its tasks have ended."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        with lightspan.operation("request", input=scope["path"]):
            await self.app(scope, receive, send)


async def request(app: Any, leave: asyncio.Event | None = None) -> None:
    """Send a request to an ASGI app. The client leaves when `leave` is set; None to stay."""
    is_sent = False

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "path": "/"}
    await app({**scope, "headers": [], "query_string": b"", "root_path": ""}, receive, send)


async def test_an_asgi_middleware_lasts_as_long_as_the_response(
    client: openai.OpenAI, url: str
) -> None:
    def items() -> Iterator[str]:
        yield str(say(client, "one"))
        yield str(say(client, "two"))

    async def endpoint(_: Any) -> StreamingResponse:
        return StreamingResponse(items(), background=BackgroundTask(say, client, "after"))

    app = Starlette(routes=[Route("/", endpoint)], middleware=[Middleware(Requests)])
    with record(url) as made:
        await request(app)
        assert await asyncio.to_thread(made.flush)
    [found] = await asyncio.to_thread(read_recorded, url)
    assert [call.asked for call in found.answered] == ["one", "two", "after"]
    assert found.rollout.task == "/"


async def test_a_sync_stream_that_is_closed_where_the_client_leaves(
    client: openai.OpenAI, url: str
) -> None:
    leave = asyncio.Event()

    def items() -> Iterator[str]:
        for number in range(100):
            yield str(say(client, f"{number}"))

    async def body() -> AsyncIterator[str]:
        with closing(lightspan.operation("ticket", input="hello")(items)()) as stream:
            async for item in iterate_in_threadpool(stream):
                leave.set()
                yield item

    async def endpoint(_: Any) -> StreamingResponse:
        return StreamingResponse(body())

    with record(url) as made:
        await request(Starlette(routes=[Route("/", endpoint)]), leave)
        assert await asyncio.to_thread(made.flush)
        [found] = await asyncio.to_thread(read_recorded, url)
    assert found.answered[0].asked == "0"
    assert found.attempt.capture_errors == []


async def test_loops_and_threads_of_a_sync_stream_belong_to_its_request(
    client: openai.OpenAI, url: str
) -> None:
    """Starlette takes each item in a thread, with a new copy of the request's context."""

    def items() -> Iterator[str]:
        with lightspan.operation("ticket", input="hello"), lightspan.agent("writer"):
            yield str(say(client, "one"))
            yield str(asyncio.run(asyncio.to_thread(say, client, "two")))
            run = contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(say, client, "three"))
            thread.start()
            thread.join()
            yield "end"

    async def endpoint(_: Any) -> StreamingResponse:
        return StreamingResponse(items())

    with record(url) as made:
        await request(Starlette(routes=[Route("/", endpoint)]))
        assert await asyncio.to_thread(made.flush)
    [found] = await asyncio.to_thread(read_recorded, url)
    assert [call.asked for call in found.answered] == ["one", "two", "three"]
    paths = [call.attributes[c.AGENT_PATH] for call in found.calls]
    assert paths == ["writer"] * 3
