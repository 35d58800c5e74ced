"""HTTP/1.1 as a client of a store speaks it: a request goes out, its response comes back, and the
connection is kept for the next one.

That is all that a store needs: no redirects, cookies or proxies, for which a general client takes
most of its time. `httptools`, the parser of Node.js, reads what comes; each connection keeps its
own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, cast
from urllib.parse import quote, urlsplit

import httptools

CONNECT_S: Final = 10.0
"""How long a connection may take, TLS included."""
WHOLE_S: Final = 300.0
"""How long a request may take on its way, to and fro."""
_KEPT_S: Final = 15.0
"""How long a connection is kept that nobody needs: less than servers and proxies keep it, or a
request would meet one that is being closed."""
_PIECE: Final = 2**18
"""Bytes of a body that are sent in one step of the event loop."""
_MOST_HEADERS: Final = 2**16
"""Bytes of a response's headers."""
_CLOSE_S: Final = 1.0
"""How long connections may take to be closed."""
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""What OpenSSL calls an answer in plain http."""


class NoAnswer(Exception):
    """There is none, for the reason that it says; there may be one next time."""


class Untrusted(Exception):
    """The server's certificate is signed by nobody who is trusted here, or is another server's."""


class SpeaksHttp(Exception):
    """Who answers speaks http, and was asked for https."""


class Response(NamedTuple):
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    """By their names in small letters."""
    body: bytes


class Exchanges:
    """Requests to one server, and their responses. All is of one event loop.

    Args:
        base: the server's URL, perhaps with a path that those of all requests follow.
        headers: of each request.

    Raises:
        ValueError: the URL is none.
    """

    def __init__(self, base: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(base)
        self._is_secret = parts.scheme == "https"
        # Python's own word for a host that cannot be one is a `UnicodeError`, a `ValueError`
        self._host = (parts.hostname or "").encode("idna").decode()
        self._port = parts.port or (443 if self._is_secret else 80)
        self._path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
        name = f"[{self._host}]" if ":" in self._host else self._host
        named = {"Host": name if parts.port is None else f"{name}:{parts.port}", **headers}
        self._headers = "".join(f"{key}: {value}\r\n" for key, value in named.items())
        self._context: ssl.SSLContext | None = None
        self._all: set[_Connection] = set()
        self._idle: list[tuple[_Connection, float]] = []
        """And since when; the one that was used last is last."""
        self._sweeping: asyncio.TimerHandle | None = None

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        silence_s: float,
        anew: bool = False,
    ) -> Response:
        """Send a request and wait for its response.

        Args:
            method: of HTTP.
            path: added to that of the server.
            body: of the request, if it has one.
            silence_s: how long nothing may arrive, or leave.
            anew: on a connection of its own: those that are open may all be so at this end only.

        Raises:
            NoAnswer: there is none.
            Untrusted: of a server that cannot show who it is.
            SpeaksHttp: of one that does not encrypt.
        """
        size = "" if body is None else f"Content-Length: {len(body)}\r\n"
        head = f"{method} {self._path + path or '/'} HTTP/1.1\r\n{self._headers}{size}\r\n".encode()
        connection = (None if anew else self._kept()) or await self._opened()
        try:
            return await connection.exchanged(head, body or b"", silence_s)
        finally:
            if connection.is_free and not anew:
                self._keep(connection)
            else:
                connection.drop()

    async def close(self) -> None:
        """Let go of all connections."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._idle.clear()
        ending = [connection.ended for connection in self._all]
        for connection in list(self._all):
            connection.drop()
        if ending:
            await asyncio.wait(ending, timeout=_CLOSE_S)

    # --- connections ----------------------------------------------------------------------
    def _kept(self) -> _Connection | None:
        while self._idle:
            connection, _ = self._idle.pop()
            if connection.is_free:
                return connection
        return None

    def _keep(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        self._idle.append((connection, loop.time()))
        if self._sweeping is None:
            self._sweeping = loop.call_later(_KEPT_S, self._sweep)

    def _sweep(self) -> None:
        """Close what nobody has needed for long."""
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0][1] <= loop.time() - _KEPT_S:
            self._idle.pop(0)[0].drop()
        self._sweeping = None
        if self._idle:
            self._sweeping = loop.call_at(self._idle[0][1] + _KEPT_S, self._sweep)

    async def _opened(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._is_secret and self._context is None:
            self._context = ssl.create_default_context()  # which knows SSL_CERT_FILE
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connected = await loop.create_connection(
                    partial(_Connection, loop),
                    self._host,
                    self._port,
                    ssl=self._context,
                    happy_eyeballs_delay=0.25,
                )
        except TimeoutError as error:
            raise NoAnswer(f"no connection within {CONNECT_S:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise Untrusted(str(error)) from error
        except ssl.SSLError as error:
            if any(sign in str(error) for sign in _NO_TLS):
                raise SpeaksHttp from error
            raise NoAnswer(str(error)) from error
        except (OSError, UnicodeError) as error:  # a name that is too long to look up
            raise NoAnswer(str(error) or type(error).__name__) from error
        connection: _Connection = connected
        self._all.add(connection)
        connection.ended.add_done_callback(lambda _: self._all.discard(connection))
        return connection


class _Connection(asyncio.Protocol):
    """One connection, with one request on its way at most."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when it is closed."""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Response] | None = None
        """Of the request that is on its way."""
        self._is_sound = True
        """Whether another request may follow."""
        self._room = asyncio.Event()
        """There is some for more of a body."""
        self._room.set()
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._has_headers = False
        self._body: list[bytes] = []
        self._seen = 0.0
        """When something last arrived, or left."""
        self._unsent = 0

    @property
    def is_free(self) -> bool:
        """Whether a request may be sent."""
        return self._is_sound and self._answer is None

    async def exchanged(self, head: bytes, body: bytes, silence_s: float) -> Response:
        """Send a request and wait for its response. Raises `NoAnswer`."""
        assert self._transport is not None
        assert self._answer is None
        answer: asyncio.Future[Response] = self._loop.create_future()
        self._answer = answer
        begun = self._seen = self._loop.time()
        self._timer = self._loop.call_later(silence_s, self._look, silence_s, begun)
        try:
            if len(body) <= _PIECE:
                self._transport.write(head + body)
            else:
                await self._send_all(head, body)
            return await answer
        except BaseException:
            self._is_sound = False
            raise
        finally:
            self._timer.cancel()
            self._answer = None

    async def _send_all(self, head: bytes, body: bytes) -> None:
        """Send piece by piece; no more once it is answered: a server may want none of it."""
        assert self._transport is not None
        assert self._answer is not None
        self._transport.write(head)
        for start in range(0, len(body), _PIECE):
            await self._room.wait()
            if self._answer.done():
                self._is_sound = False
                return
            self._transport.write(body[start : start + _PIECE])
            await asyncio.sleep(0)

    def drop(self) -> None:
        """Close it, whatever is on its way."""
        self._is_sound = False
        if self._transport is not None:
            self._transport.abort()

    def _look(self, silence_s: float, begun: float) -> None:
        """Whether something has arrived or left since the last look."""
        assert self._transport is not None
        now, unsent = self._loop.time(), self._transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._seen, self._unsent = now, unsent
        if now - begun >= WHOLE_S:
            self._fail(f"no whole answer within {WHOLE_S:g} s")
        elif now - self._seen >= silence_s:
            self._fail(
                f"no answer for {silence_s:g} s: the connection may be open at this end only"
            )
        else:
            due = min(self._seen + silence_s, begun + WHOLE_S)
            self._timer = self._loop.call_at(due, self._look, silence_s, begun)

    def _fail(self, reason: str) -> None:
        self._is_sound = False
        self._room.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(NoAnswer(reason))

    # --- called by the event loop ---------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._seen = self._loop.time()
        if self._answer is None:  # nobody asked: what it means, nobody knows
            self.drop()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it wants to speak something else than HTTP")
        except httptools.HttpParserError as error:
            cause: Any = error.__context__ or error
            self._fail(f"it answers with what is no HTTP: {cause}")

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._has_headers and not self._says_length():
            self._complete()  # it ends with the connection
        self._fail(str(error or "") or "the connection was closed before the answer was there")
        if not self.ended.done():
            self.ended.set_result(None)

    # --- called by the parser -------------------------------------------------------------
    def on_message_begin(self) -> None:
        if self._answer is None or self._answer.done():
            self._is_sound = False  # nobody asked for it: the rest of it would answer what is next
        self._headers, self._body, self._has_headers, self._header_bytes = {}, [], False, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MOST_HEADERS:
            raise ValueError("its headers do not end")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_headers = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:  # below, it is told to go on
            self._is_sound = self._is_sound and self._parser.should_keep_alive()
            self._complete()

    def _says_length(self) -> bool:
        return not {"content-length", "transfer-encoding"}.isdisjoint(self._headers)

    def _complete(self) -> None:
        self._has_headers = False
        if self._answer is not None and not self._answer.done():
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            status = self._parser.get_status_code()
            self._answer.set_result(Response(status, self._headers, body))
            self._body = []


async def answers(url: str, headers: Mapping[str, str], timeout_s: float) -> int:
    """The status with which a server answers, asked once; 0 if it does not."""
    with suppress(ValueError, NoAnswer, Untrusted, SpeaksHttp, TimeoutError):
        exchanges = Exchanges(url, headers)
        try:
            async with asyncio.timeout(timeout_s):
                return (await exchanges.ask("GET", "", silence_s=timeout_s)).status
        finally:
            await exchanges.close()
    return 0
