"""Connections: where the gateway listens, how many there are at once, and how long one may idle.

A process that has no file left to open cannot write its store, start a runner or ask an endpoint.
So connections take a part of its files only. Whoever comes when all are taken takes the place of
the connection that has idled longest; where none idles, they wait in the system's queue.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from lightspan.errors import ConfigError

log = logging.getLogger(__name__)

IDLE_S: Final = 75.0
"""How long a connection may say nothing, or be busy with the headers of a request. Longer than
clients keep one (5 to 15 s): a request on a connection that is being closed is lost."""
UNREAD_S: Final = 60.0
"""How long a client may leave what it is sent unread (where the system can tell: Linux)."""
_FILES: Final = 16_384
"""Files that a server wants to be allowed to open."""
MOST: Final = 2_048
"""Connections at once, however many files a process may open."""
BACKLOG: Final = 1_024
"""Connections that wait to be accepted."""
BRIEFLY_S: Final = 0.5
"""How long a connection may idle at least, however many wait: it has come to ask something. Without
this a flood of newcomers would end each other, and those of honest clients."""
_LOOK_S: Final = 0.02
"""How often it is looked for a place, while there is none."""
_TURNS: Final = 5
"""Of the event loop, until a connection that was dropped has left: its task ends first."""
_NO_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connections:
    """Accepts connections.

    Args:
        most: at once; None for what this process's files allow.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most_connections() if most is None else most
        self._listening: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._beginning: set[asyncio.Task[None]] = set()
        self._idle: dict[web.RequestHandler, float] = {}
        """Since when, the one that has idled longest first; some may be closed."""

    def listen(self, host: str, port: int) -> int:
        """Take the port, which is returned (0 takes a free one).

        Raises:
            ConfigError: it cannot be taken.
        """
        self._listening = _bound(host, port, backlog=BACKLOG)
        for listening in self._listening:
            listening.setblocking(False)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # what it accepts inherits it
                milliseconds = round(1000 * UNREAD_S)
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        return int(self._listening[0].getsockname()[1])

    def accept(self, server: web.Server) -> None:
        """Begin to accept, for aiohttp's server."""
        self._accepting = [
            asyncio.create_task(self._accept(listening, server)) for listening in self._listening
        ]

    async def close(self) -> None:
        """Accept no more. Idempotent."""
        accepting, self._accepting = self._accepting, []
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, *self._beginning, return_exceptions=True)
        for listening in self._listening:
            listening.close()
        self._listening = []
        self._idle.clear()

    @web.middleware
    async def working(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note that a connection does not idle."""
        self._idle.pop(request.protocol, None)
        try:
            return await handler(request)
        finally:
            if request.protocol.connected:
                self._idle[request.protocol] = time.monotonic()

    # --- accepting ------------------------------------------------------------------------
    async def _accept(self, listening: socket.socket, server: web.Server) -> None:
        while True:
            try:
                accepted = await _accepted(listening)
            except OSError as error:
                await self._not_accepted(error)
                continue
            try:
                await self._room(server)
            except asyncio.CancelledError:
                accepted.close()
                raise
            # others that came with it are accepted meanwhile
            beginning = asyncio.create_task(self._begin(accepted, server))
            self._beginning.add(beginning)
            beginning.add_done_callback(self._beginning.discard)

    async def _begin(self, accepted: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.connect_accepted_socket(server, accepted)
        except OSError:  # the client is gone
            accepted.close()
            return
        self._idle[protocol] = time.monotonic()  # its request is read when the loop goes on
        if len(self._idle) > 2 * len(server.connections) + 64:
            self._idle = {one: since for one, since in self._idle.items() if one.connected}

    async def _room(self, server: web.Server) -> None:
        """Wait for a place."""
        while len(server.connections) + len(self._beginning) >= self._most:
            if not self._drop_idle(BRIEFLY_S):
                await asyncio.sleep(_LOOK_S)
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    async def _not_accepted(self, error: OSError) -> None:
        """The client is gone already, or other parts of this process hold all of its files."""
        if error.errno in _NO_FILES:
            log.warning("no connection can be accepted for now: %s", error)
            self._drop_idle(0.0)
            await asyncio.sleep(1.0)

    def _drop_idle(self, at_least: float) -> bool:
        """Close the connection that has idled longest, if one has idled for so many seconds."""
        while self._idle:
            longest, since = next(iter(self._idle.items()))
            if longest.transport is not None and time.monotonic() - since < at_least:
                return False
            del self._idle[longest]
            if longest.transport is not None:
                longest.transport.abort()
                return True
        return False


async def _accepted(listening: socket.socket) -> socket.socket:
    """The next connection. `loop.sock_accept` loses the one that it has accepted where it is
    cancelled before it goes on, and leaves its socket open."""
    while True:
        try:
            return listening.accept()[0]
        except (BlockingIOError, InterruptedError):
            await _readable(listening)


async def _readable(listening: socket.socket) -> None:
    """Wait until a connection is there, as a rule: another process may be quicker."""
    loop = asyncio.get_running_loop()
    comes = asyncio.Event()
    loop.add_reader(listening, comes.set)
    try:
        await comes.wait()
    finally:
        loop.remove_reader(listening)


def raise_file_limit() -> None:
    """Let this process open as many files as it may: a shell allows 1,024, of which connections get
    two fifths, where the system allows hundreds of thousands. For processes that run no app, which
    might rely on small numbers (`select`)."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system may refuse what it said that it allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """How many connections the files that this process may open allow.

    Two fifths of them: a call that goes on to an endpoint takes a file there too.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else max(1, min(MOST, files * 2 // 5))


# --- places -----------------------------------------------------------------------------------
def read_place(text: str) -> tuple[str, int]:
    """Interface and port of `HOST` or `HOST:PORT`; without a port 0, which takes a free one.

    Raises:
        ConfigError: it is none, or no address that others could be told.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port or 0
        is_place = parts.netloc == text and "@" not in text and bool(host)
    except (TypeError, ValueError):
        host, port, is_place = "", 0, False
    if not is_place:
        raise ConfigError(f'gateway={text!r} is no address: give "HOST" or "HOST:PORT"')
    if host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"gateway={text!r} is every address of this machine, and others have to be told one: "
            "give the one by which the store's server reaches it"
        )
    return host, port


def check_port(host: str, port: int) -> None:
    """Whether one could listen there now.

    Raises:
        ConfigError: the port cannot be taken.
    """
    for probe in _bound(host, port):
        probe.close()


def _bound(host: str, port: int, backlog: int | None = None) -> list[socket.socket]:
    """A socket for each address of the host, all at one port; with a backlog they listen."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((address[0], port, *address[2:]))
            port = bound.getsockname()[1]
            if backlog is not None:
                bound.listen(backlog)
    except OSError as error:
        for bound in sockets:
            bound.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; give another port, or 0 for a free one"
        ) from error
    return sockets
