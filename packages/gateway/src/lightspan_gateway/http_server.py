"""The HTTP server that the gateway and the store's server are built on."""

from __future__ import annotations

import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Self

from aiohttp import web
from aiohttp.http import HttpProcessingError

from lightspan.errors import ConfigError

KEEPALIVE_S: Final = 75.0
"""Longer than clients keep a connection (5 to 15 s): a request sent while the server closes it is
lost."""
BACKLOG: Final = 1_024
"""Connections that wait to be accepted."""
MAX_OPEN_FILES: Final = 16_384

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer(ABC):
    """Serve the routes of a subclass.

    Args:
        host: interface.
        port: 0 takes a free one.
        max_body: bytes of a request at most.
        shutdown_s: how long handlers may go on after `close`.
    """

    def __init__(self, host: str, port: int, *, max_body: int, shutdown_s: float) -> None:
        self._host = host
        self._port = port
        self._max_body = max_body
        self._shutdown_s = shutdown_s
        self._app_runner: web.AppRunner | None = None

    @abstractmethod
    def _routes(self) -> Sequence[web.AbstractRouteDef]:
        """Return the routes."""

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port cannot be taken.
        """
        app = web.Application(client_max_size=self._max_body)
        app.add_routes(self._routes())
        runner = web.AppRunner(
            app,
            # a client that leaves cancels its handler, and so its generation
            handler_cancellation=True,
            auto_decompress=False,  # it would decompress on the event loop, before authentication
            keepalive_timeout=KEEPALIVE_S,
            logger=_log,
            access_log=None,
            shutdown_timeout=self._shutdown_s,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            raise _cannot_listen(self._host, self._port, error) from error
        self._app_runner = runner
        self._port = runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening and cancel the running handlers. Idempotent."""
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


def _is_server_error(record: logging.LogRecord) -> bool:
    """Drop aiohttp's log records of malformed requests, each of which has a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_log: Final = logging.getLogger(__name__)
_log.addFilter(_is_server_error)


async def go_on(request: web.Request) -> None:
    """Answer `Expect: 100-continue` and ignore other expectations.

    aiohttp's own handler fails with 500 where it quotes a header that is not UTF-8.
    """
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer yet


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files: a shell's is 256 to 1,024, and every runner
    keeps connections. Not for processes that run an app, which may use `select`."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS refuses values below its stated hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_port(host: str, port: int) -> None:
    """Check that the port is free, before a model is loaded.

    Raises:
        ConfigError: it cannot be taken.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno is None or isinstance(error, socket.gaierror):
        reason = error.strerror or str(error)
    else:  # asyncio and `create_server` add the address to `strerror`
        reason = os.strerror(error.errno)
    return ConfigError(
        f"cannot listen on {host}:{port}: {reason}; give another port, or 0 for a free one"
    )
