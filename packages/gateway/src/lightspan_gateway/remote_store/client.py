"""The RPC client of a served store: HTTP requests, sent again until one is answered.

Every request may be sent twice: writes go by ids (`stores.protocol.Store`). So a lost answer, a
server that restarts, a proxy that gives up and a busy server are all handled by a retry after the
next pause of `RETRY_BACKOFF_S`.

The sockets belong to an event loop in a thread of the connection: a store is used from any event
loop, and outlives each.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - else a thread imports it: see _sql/statements.py
import io
import logging
import os
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import aiohttp
import msgspec

from lightspan import __version__
from lightspan.errors import (
    DataError,
    LightspanError,
    StoreClosedError,
    StoreError,
    StoreFormatError,
    StoreUnreachableError,
)
from lightspan.schema import clock
from lightspan.schema.redaction import clean_text
from lightspan.schema.semconv import HEADER_PROTOCOL, HEADER_VERSION, PROTOCOL_VERSION
from lightspan.stores.protocol import RETRY_BACKOFF_S
from lightspan_gateway.remote_store.errors import Failure
from lightspan_gateway.remote_store.request_batcher import RequestBatcher
from lightspan_gateway.remote_store.rpc import (
    CONTENT_TYPE,
    PATH,
    POLL_S,
    Greeting,
    Operation,
    decoded,
    encode_batch,
)
from lightspan_gateway.remote_store.url import RemoteAddress

T = TypeVar("T")

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 300.0
READ_TIMEOUT_S: Final = 30.0
"""Without a byte of the answer: the connection may be open at this end only."""
MIN_READ_TIMEOUT_S: Final = 1.0
"""Of a heartbeat, however short its lease."""
RETRY_TIMEOUT_S: Final = 60.0
GREETING_BACKOFF_S: Final = RETRY_BACKOFF_S[:3]
"""Shorter: a mistyped address should fail within seconds."""
_WARN_FROM_S: Final = 8.0
"""The pause before which a retry is logged: none of those of the greeting."""
MAX_JOINED_BYTES: Final = 2**14
"""Of an operation that shares a request: all of it wait for the slowest."""
_LARGE_BODY: Final = 2**20
"""Bytes beyond which aiohttp wants a file, which it sends in chunks."""
_BUSY: Final = frozenset({429, 502, 503, 504})
_PLAIN_HTTP: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""OpenSSL's names for an answer in plain HTTP."""
_sleep = asyncio.sleep
_failure_decoder = msgspec.msgpack.Decoder(Failure)
_batch_decoder = msgspec.msgpack.Decoder(list[tuple[int, bytes]])
_greeting_decoder = msgspec.msgpack.Decoder(Greeting)


class Response(NamedTuple):
    """A status with what goes with it."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def protocol(self) -> str:
        """Of the lightspan server that made it; empty if a proxy did."""
        return self.headers.get(HEADER_PROTOCOL, "")


class ServerConnection:
    """The HTTP sessions of one process with a server.

    Args:
        address: of the store.
        key: empty if there is none.
    """

    def __init__(self, address: RemoteAddress, key: str) -> None:
        self.pid: Final = os.getpid()
        self._address = address
        self._key = key
        self._tasks: dict[asyncio.Task[bytes], Operation] = {}
        self._batcher = RequestBatcher(self._send_batch)
        self._lock = threading.Lock()
        self._is_closed = False
        self._has_warned = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_exception)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="lightspan-store-http", daemon=True
        )
        self._thread.start()
        self._session = self._run(self._open_session())

    def greet(self) -> Greeting:
        """Return what the server says of itself. Blocks.

        Raises:
            StoreUnreachableError: nobody answers, or only that the server is busy.
            StoreError: it refuses the key, or is not such a server.
        """
        return self._run(self._greet())

    def ask(
        self, operation: Operation, body: bytes, lease_s: float | None = None
    ) -> asyncio.Future[bytes]:
        """Send a request; the future, of the running loop, has the body of its answer.

        Args:
            operation: what is asked.
            body: its encoded arguments.
            lease_s: of a heartbeat, which has to be answered in time.
        """
        with self._lock:  # `close` waits for each request that was handed over before it
            if self._is_closed:
                raise StoreClosedError(f"store {self._address.url} is closed: open it first")
            work = self._answer(operation, body, lease_s)
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        """Wait for the requests under way, but for those that wait for a change, and close."""
        with self._lock:
            self._is_closed = True
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # --- in the thread --------------------------------------------------------------------
    async def _open_session(self) -> aiohttp.ClientSession:
        headers = {HEADER_PROTOCOL: str(PROTOCOL_VERSION), "Content-Type": CONTENT_TYPE}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return aiohttp.ClientSession(
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )

    async def _close(self) -> None:
        await asyncio.sleep(0)  # the tasks that were handed over last have to begin
        for task, operation in self._tasks.items():
            if operation.waits:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def _greet(self) -> Greeting:
        send = partial(self._send, "GET", "", None, READ_TIMEOUT_S)
        body = await self._retry("", send, GREETING_BACKOFF_S)
        try:
            greeting = decoded(_greeting_decoder, body, "its greeting")
        except DataError as error:
            raise self._no_server(str(error)) from error
        if greeting.protocol != PROTOCOL_VERSION:
            raise self._other_version(str(greeting.protocol), greeting.lightspan)
        return greeting

    async def _answer(self, operation: Operation, body: bytes, lease_s: float | None) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = operation
        try:
            return await self._retry(operation.name, self._sender(operation, body, lease_s))
        except asyncio.CancelledError:
            if self._is_closed and operation.waits:
                raise StoreClosedError(
                    f"store {self._address.url} was closed while somebody waited for a change"
                ) from None
            raise
        finally:
            del self._tasks[task]

    def _sender(
        self, operation: Operation, body: bytes, lease_s: float | None
    ) -> Callable[[], Awaitable[Response]]:
        if operation.joins and len(body) <= MAX_JOINED_BYTES:
            return partial(self._batcher.send, (operation.name, body))
        timeout_s = READ_TIMEOUT_S + (POLL_S if operation.waits else 0.0)
        if lease_s is not None:
            timeout_s = min(READ_TIMEOUT_S, max(MIN_READ_TIMEOUT_S, lease_s / 4))
        return partial(self._send, "POST", f"/{operation.name}", body, timeout_s)

    async def _retry(
        self,
        name: str,
        send: Callable[[], Awaitable[Response]],
        backoff_s: Sequence[float] = RETRY_BACKOFF_S,
    ) -> bytes:
        """Return the body of the answer, however often it takes to ask for it."""
        start = clock.monotonic()
        for pause in (*backoff_s, None):
            try:
                body = self._read(name, await send())
            except StoreUnreachableError as error:
                if pause is None or clock.monotonic() - start > RETRY_TIMEOUT_S:
                    raise
                if pause >= _WARN_FROM_S and not self._has_warned:
                    self._has_warned = True  # once, however many operations retry
                    log.warning("asking again, for up to a minute: %s", error)
                # jitter, or all clients of a server that comes back would come at once
                await _sleep(pause * random.uniform(0.75, 1.25))
            else:
                self._has_warned = False
                return body
        raise AssertionError("the last pause is None")

    async def _send_batch(self, items: Sequence[tuple[str, bytes]]) -> Sequence[Response]:
        if len(items) == 1:
            [(name, body)] = items
            return [await self._send("POST", f"/{name}", body, READ_TIMEOUT_S)]
        response = await self._send("POST", "", encode_batch(items), READ_TIMEOUT_S)
        if not response.protocol or response.status != 200:
            return [response] * len(items)
        answers = decoded(_batch_decoder, response.body, "the answers to a batch")
        return [response._replace(status=status, body=body) for status, body in answers]

    async def _send(
        self, method: str, path: str, body: bytes | None, read_timeout_s: float
    ) -> Response:
        """Send one request. Raises `StoreUnreachableError` where a retry may help."""
        try:
            async with self._session.request(
                method,
                f"{self._address.base}{PATH}{path}",
                data=io.BytesIO(body) if body and len(body) > _LARGE_BODY else body,
                allow_redirects=False,  # the key would go along
                timeout=aiohttp.ClientTimeout(
                    REQUEST_TIMEOUT_S, sock_read=read_timeout_s, sock_connect=CONNECT_TIMEOUT_S
                ),
            ) as response:
                return Response(response.status, response.headers, await response.read())
        except aiohttp.ClientConnectorCertificateError as error:
            raise StoreError(
                f"store {self._address.url}: the server's certificate is not trusted ({error}); "
                "name your authority's in SSL_CERT_FILE"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if any(name in str(error) for name in _PLAIN_HTTP):
                raise StoreError(
                    f"store {self._address.url}: who answers there speaks http, not https: "
                    "`lightspan serve` itself does, so write http://, or name the port of the "
                    "proxy with TLS in front of it"
                ) from error
            reason = str(getattr(error, "os_error", error)) or type(error).__name__
            raise StoreUnreachableError(
                f"store {self._address.url} cannot be reached ({reason}): see that `lightspan "
                "serve --store …` runs there"
            ) from error

    def _read(self, name: str, response: Response) -> bytes:
        """Return the body of a good answer to an operation, or to the greeting (no name).

        Raises:
            StoreUnreachableError: a retry may help.
            LightspanError: what the store says, or why there is no answer.
        """
        status, protocol = response.status, response.protocol
        if protocol and status == 200:
            return response.body
        if status in _BUSY:
            raise StoreUnreachableError(str(self._refusal(name, response)))
        if protocol and protocol != str(PROTOCOL_VERSION):
            version = clean_text(response.headers.get(HEADER_VERSION, ""))[:40]
            raise self._other_version(protocol, version)
        if protocol or status == 413:  # a proxy may refuse large bodies
            raise self._refusal(name, response)
        raise self._no_server(f"it answered with status {status}")

    # --- errors ---------------------------------------------------------------------------
    def _refusal(self, name: str, response: Response) -> LightspanError:
        where = f"store {self._address.url}{f', {name}' if name else ''}"
        if response.protocol:
            try:
                failure = decoded(_failure_decoder, response.body, "what went wrong")
            except DataError:
                return StoreError(f"{where}: the server answered with status {response.status}")
            if response.status == 401:
                key = f"the key in ${self._address.key_variable}" if self._key else "no key"
                return StoreError(f"{where}: {failure.message} (sent: {key})")
            return failure.error(where)
        return StoreError(f"{where}: a proxy in front of it answers with {response.status}")

    def _no_server(self, reason: str) -> StoreFormatError:
        return StoreFormatError(
            f"store {self._address.url}: there is no `lightspan serve --store …` of this version "
            f"({reason}); a policy's own server is no store"
        )

    def _other_version(self, protocol: str, version: str) -> StoreFormatError:
        theirs = f"the server's lightspan {version}" if version else "the server's lightspan"
        return StoreFormatError(
            f"store {self._address.url}: {theirs} speaks protocol {protocol}, this one "
            f"({__version__} of {sys.executable}) speaks {PROTOCOL_VERSION}: install the same "
            "version of lightspan on both sides"
        )


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # aiohttp reports a program that ends without closing its store, and asyncio the error of a
    # waiting request that was cancelled by its caller and by `stop`: neither is a failure
    is_expected = isinstance(context.get("exception"), StoreClosedError)
    if not is_expected and not context.keys() & {"client_session", "connector"}:
        loop.default_exception_handler(context)
