"""The base class of the gateway and the store's server."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Self

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Middleware

from lightspan.errors import ConfigError
from lightspan_gateway.limits import ServerLimits
from lightspan_gateway.serving.loopback import own_address

BACKLOG: Final = 1_024
"""Maximum number of connections that wait to be accepted."""
MAX_OPEN_FILES: Final = 16_384

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer(ABC):
    """Serve HTTP requests. A subclass defines the routes.

    Args:
        host: address of the interface to listen on.
        port: port; 0 for any free port.
        limits: limits and times.
        shutdown_s: seconds for which `close` waits for running requests before it cancels them.
        tls: settings of TLS; None to serve plain HTTP.
    """

    def __init__(
        self,
        host: str,
        port: int,
        limits: ServerLimits,
        *,
        shutdown_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._limits = limits
        self._shutdown_s = shutdown_s
        self._tls = tls
        self._app_runner: web.AppRunner | None = None
        self._listener: asyncio.Server

    @abstractmethod
    def _routes(self) -> Sequence[web.AbstractRouteDef]:
        """Return the routes that the server answers."""

    def _middlewares(self) -> Sequence[Middleware]:
        """Return functions that wrap the handler of every request, the outermost first."""
        return ()

    async def start(self) -> None:
        """Listen on the port.

        Raises:
            ConfigError: the port is not available.
        """
        app = web.Application(
            client_max_size=self._limits.max_body_bytes, middlewares=self._middlewares()
        )
        app.add_routes(self._routes())
        runner = web.AppRunner(
            app,
            # a client that disconnects cancels its handler, and so its generation
            handler_cancellation=True,
            # aiohttp would decompress on the event loop, before authentication
            auto_decompress=False,
            keepalive_timeout=self._limits.keepalive_s,
            logger=_log,
            access_log=None,
            shutdown_timeout=self._shutdown_s,
        )
        await runner.setup()
        assert runner.server is not None
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                runner.server, self._host, self._port, ssl=self._tls, backlog=BACKLOG
            )
        except OSError as error:
            await runner.cleanup()
            raise _cannot_listen(self._host, self._port, error) from error
        self._app_runner = runner
        self._port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and cancel the running handlers. Idempotent."""
        runner, self._app_runner = self._app_runner, None
        if runner is not None:
            await _stop_listening(self._listener)
            await runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """Origin of the server, such as `http://127.0.0.1:8123`."""
        return self._url_of(self._host)

    @property
    def public_url(self) -> str:
        """Origin of the server for other machines, if it listens at all addresses; else `url`."""
        is_any = self._host in ("", "0.0.0.0", "::")
        return self._url_of((own_address() if is_any else "") or self._host)

    def _url_of(self, host: str) -> str:
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self._tls else 'http'}://{host}:{self._port}"

    @property
    def port(self) -> int:
        """The port on which the server listens. Read it after `start`."""
        return self._port


async def _stop_listening(listener: asyncio.Server) -> None:
    """Accept no more connections, and hand over those that are accepted.

    asyncio hands a connection over two iterations after it accepted it. If the listener were closed
    in between, the connection would stay open.
    """
    loop = asyncio.get_running_loop()
    for listening in listener.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(3):
        await asyncio.sleep(0)
    listener.close()


def _is_server_error(record: logging.LogRecord) -> bool:
    """Return whether a record of aiohttp's log is about an error of this server.

    The result is False for a malformed request of a client.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_log: Final = logging.getLogger(__name__)
_log.addFilter(_is_server_error)


def raise_file_limit() -> None:
    """Allow this process to open up to `MAX_OPEN_FILES` files, or as many as the system permits.

    Shells often set a limit of 256 to 1,024. Do not call this function in a process that runs an
    app: the app may use `select`, which fails for high file numbers.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):  # macOS refuses some values below its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def check_port(host: str, port: int) -> None:
    """Check that the port is available, for example before a model is loaded.

    Raises:
        ConfigError: the port is not available.
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
