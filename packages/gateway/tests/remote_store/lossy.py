"""A proxy that drops the first answer to every request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from lightspan_gateway.remote_store.rpc import PATH, read_batch

_HOP = ("Content-Length", "Connection", "Transfer-Encoding", "Host")


class LossyProxy:
    """Forward requests, and drop the answer to each request that is sent for the first time.

    Args:
        upstream: address of the server.
        silent: keep the connection open instead of closing it.
    """

    def __init__(self, upstream: str, *, silent: bool = False) -> None:
        self._upstream = upstream
        self._silent = silent
        self._seen: set[tuple[str, bytes]] = set()
        """Operations whose answer was dropped; the retries of a batch may be in other batches."""
        self.lost = 0
        """Number of dropped answers."""
        self.url = ""

    async def run(self, up: threading.Event, down: asyncio.Event) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            up.set()
            await down.wait()
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        url = f"{self._upstream}{request.path}"
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            content = await answer.read()
            told = {name: value for name, value in answer.headers.items() if name not in _HOP}
        operations = {(request.path.removeprefix(f"{PATH}/"), body)}
        if request.path == PATH and body:
            operations = set(read_batch(body))
        if request.method == "POST" and operations.isdisjoint(self._seen):
            self._seen |= operations
            self.lost += 1
            if self._silent:
                await asyncio.Event().wait()
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=answer.status, body=content, headers=told)


@contextmanager
def lossy(upstream: str, *, silent: bool = False) -> Iterator[LossyProxy]:
    """Run a proxy in the block."""
    proxy = LossyProxy(upstream, silent=silent)
    runner, up, down = asyncio.Runner(), threading.Event(), asyncio.Event()
    loop = runner.get_loop()

    def run() -> None:
        with runner:  # cancels the tasks of dropped requests
            loop.run_until_complete(proxy.run(up, down))

    thread = threading.Thread(target=run)
    thread.start()
    up.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join()
