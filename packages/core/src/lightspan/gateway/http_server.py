"""What listens and answers over HTTP: its life, from the port to the last answer."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Self

from aiohttp import web
from aiohttp.http import HttpProcessingError

from lightspan.gateway.connections import IDLE_S, Connections
from lightspan.gateway.heap import return_memory


class HttpServer(ABC):
    """Answers what its routes say.

    Args:
        host: interface.
        port: 0 takes a free one.
        max_body: bytes of a request at most.
        shutdown_s: how long handlers may go on when it is closed.
        most_connections: at once; None for what this process's files allow.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_body: int,
        shutdown_s: float,
        most_connections: int | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._max_body = max_body
        self._shutdown_s = shutdown_s
        self._connections = Connections(most_connections)
        self._app_runner: web.AppRunner | None = None
        self._returning: asyncio.Task[None] | None = None

    @abstractmethod
    def _routes(self) -> Sequence[web.AbstractRouteDef]:
        """What it answers."""

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port cannot be taken.
        """
        self._port = self._connections.listen(self._host, self._port)
        middlewares = [self._connections.working]
        app = web.Application(client_max_size=self._max_body, middlewares=middlewares)
        app.add_routes(self._routes())
        self._app_runner = _runner_of(app, self._shutdown_s)
        await self._app_runner.setup()
        assert self._app_runner.server is not None  # it was set up
        self._connections.accept(self._app_runner.server)
        self._returning = asyncio.create_task(return_memory(), name="return_memory")

    async def close(self) -> None:
        """Stop listening and end what is under way. Idempotent."""
        if self._returning is not None:
            self._returning.cancel()
        await self._connections.close()
        runner, self._app_runner = self._app_runner, None
        if runner is not None:
            await runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """The origin, such as `http://127.0.0.1:8123`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether it tells of a failure of ours. Of every malformed request aiohttp tells too, with a
    traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_log: Final = logging.getLogger(__name__)
_log.addFilter(_is_ours)


def _runner_of(app: web.Application, shutdown_s: float) -> web.AppRunner:
    """What runs an application on `Connections`; closing, it lets handlers go on for so long."""
    return web.AppRunner(
        app,
        # a client that leaves cancels its handler, and so what it asked for
        handler_cancellation=True,
        auto_decompress=False,  # it would unpack on the event loop, before anybody is admitted
        keepalive_timeout=IDLE_S,
        logger=_log,
        access_log=None,
        shutdown_timeout=shutdown_s,
    )


async def go_on(request: web.Request) -> None:
    """Let a client go on that waits for leave to send its body. Other expectations are passed over:
    aiohttp fails where it quotes one that is no text."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        with suppress(ConnectionError):  # the client is gone: aiohttp would log a failure of ours
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer yet
