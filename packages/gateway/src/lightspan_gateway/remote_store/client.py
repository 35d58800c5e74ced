"""The RPC client of a served store: HTTP requests with retries.

All operations are idempotent (`stores.protocol.Store`), so a lost answer, a restart of the server,
a failing proxy and a busy server are all handled by a retry after the next pause of
`SERVER_BACKOFF_S`.

The sockets belong to an event loop in a separate thread, because a store may be used from several
event loops, one after another.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - else a thread imports it: see _sql/queries.py
import io
import logging
import math
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
from lightspan.stores.timings import StoreTimings
from lightspan_gateway.remote_store import rpc
from lightspan_gateway.remote_store.errors import Failure
from lightspan_gateway.remote_store.request_batcher import RequestBatcher
from lightspan_gateway.remote_store.url import RemoteAddress

T = TypeVar("T")

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 300.0
SERVER_BACKOFF_S: Final = (*RETRY_BACKOFF_S[:3], 5.0)
"""Pauses in seconds before the retries of a request; the last one is repeated.

It is shorter than the time for which a complete training waits for its runners. A runner that
paused for longer after a restart of the trainer would miss the end of a short training, and would
then wait forever."""
GREETING_BACKOFF_S: Final = RETRY_BACKOFF_S[:3]
"""Pauses in seconds before the retries of the first request (`greet`).

They are few, because a mistyped address should fail within seconds.
"""
_WARN_FROM_S: Final = 5.0
"""Minimum pause before a retry, in seconds, from which a warning is logged."""
_WARN_INTERVAL_S: Final = 60.0
"""Minimum seconds between two such warnings."""
MAX_BATCHED_BYTES: Final = 2**14
"""Maximum bytes of the arguments of an operation in a batch.

A larger operation is sent alone, because a batch is answered after its slowest operation."""
_LARGE_BODY: Final = 2**20
"""Bytes from which aiohttp warns about a body, unless the body is passed as a file."""
_BUSY: Final = frozenset({429, 502, 503, 504})
_PLAIN_HTTP: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""OpenSSL's error names for an answer in plain HTTP."""
_OTHER_NAME: Final = (
    "is for another name",
    "write a name that is in it in the store's URL, or give the server a certificate for this name",
)
_CERTIFICATE_PROBLEMS: Final = {
    9: ("is not valid yet", "set the clocks of both machines"),
    10: ("has expired", "renew it at the server, or set this machine's clock"),
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}
"""OpenSSL's code (`X509_V_ERR_…`) of an error in a certificate → problem and remedy."""
_UNTRUSTED: Final = ("is not trusted", "set SSL_CERT_FILE to the certificate of your authority")
_sleep = asyncio.sleep
_failure_decoder = msgspec.msgpack.Decoder(Failure)
_batch_decoder = msgspec.msgpack.Decoder(list[tuple[int, bytes]])
_greeting_decoder = msgspec.msgpack.Decoder(rpc.Greeting)


class Response(NamedTuple):
    """A response of the server, or of a proxy."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def protocol(self) -> str:
        """Protocol version of the lightspan server; empty for the response of a proxy."""
        return self.headers.get(HEADER_PROTOCOL, "")


class ServerConnection:
    """A connection of this process to a served store, with an event loop in its own thread.

    Args:
        address: the store's address.
        key: the key; empty for none.
        timings: times and limits.
    """

    def __init__(self, address: RemoteAddress, key: str, timings: StoreTimings) -> None:
        self.pid: Final = os.getpid()
        self._address = address
        self._key = key
        self._timings = timings
        self._tasks: dict[asyncio.Task[bytes], rpc.Operation] = {}
        self._batcher = RequestBatcher(self._send_batch)
        self._lock = threading.Lock()
        self._is_closed = False
        self._warned_at = -math.inf
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_exception)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="lightspan-store-http", daemon=True
        )
        self._thread.start()
        self._session = self._run(self._open_session())

    def greet(self) -> rpc.Greeting:
        """Return the server's description of itself. Blocks.

        Raises:
            StoreUnreachableError: there is no answer, or the server is busy.
            StoreError: the server refuses the key, is not a store's server, or has another version.
        """
        return self._run(self._greet())

    def call(
        self, operation: rpc.Operation, body: bytes, lease_s: float | None = None
    ) -> asyncio.Future[bytes]:
        """Send an operation to the server; return a future for the body of the answer.

        The future belongs to the running event loop.

        Args:
            operation: the operation.
            body: encoded arguments of the operation.
            lease_s: for a heartbeat, the seconds after which an attempt without heartbeats is lost;
                the request's timeout depends on it. None for any other operation.

        Raises:
            StoreClosedError: the connection is stopped.
        """
        with self._lock:  # `stop` waits for every request that is submitted before it
            if self._is_closed:
                raise StoreClosedError(f"store {self._address.url} is closed: open it first")
            work = self._answer(operation, body, lease_s)
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        """Cancel the long polls, wait for all other requests, and close the connection."""
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
        headers = {HEADER_PROTOCOL: str(PROTOCOL_VERSION), "Content-Type": rpc.CONTENT_TYPE}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return aiohttp.ClientSession(
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        )

    async def _close(self) -> None:
        await asyncio.sleep(0)  # let the tasks that were submitted last start
        for task, operation in self._tasks.items():
            if operation.is_long_poll:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def _greet(self) -> rpc.Greeting:
        send = partial(self._send, "GET", "", None, self._timings.read_timeout_s)
        body = await self._retry("", send, GREETING_BACKOFF_S)
        try:
            greeting = rpc.decode(_greeting_decoder, body, "its greeting")
        except DataError as error:
            raise self._no_server(str(error)) from error
        if greeting.protocol != PROTOCOL_VERSION:
            raise self._other_version(str(greeting.protocol), greeting.lightspan)
        return greeting

    async def _answer(self, operation: rpc.Operation, body: bytes, lease_s: float | None) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = operation
        try:
            return await self._retry(operation.name, self._sender(operation, body, lease_s))
        except asyncio.CancelledError:
            if self._is_closed and operation.is_long_poll:
                raise StoreClosedError(
                    f"store {self._address.url} was closed during a wait for a change"
                ) from None
            raise
        finally:
            del self._tasks[task]

    def _sender(
        self, operation: rpc.Operation, body: bytes, lease_s: float | None
    ) -> Callable[[], Awaitable[Response]]:
        if operation.is_batchable and len(body) <= MAX_BATCHED_BYTES:
            return partial(self._batcher.send, (operation.name, body))
        timings = self._timings
        timeout_s = timings.read_timeout_s + (rpc.POLL_S if operation.is_long_poll else 0.0)
        if lease_s is not None:
            timeout_s = max(timings.min_read_timeout_s, lease_s / 4)
            timeout_s = min(timings.read_timeout_s, timeout_s)
        return partial(self._send, "POST", f"/{operation.name}", body, timeout_s)

    async def _retry(
        self,
        name: str,
        send: Callable[[], Awaitable[Response]],
        backoff_s: Sequence[float] = SERVER_BACKOFF_S,
    ) -> bytes:
        """Call `send` until an answer arrives, for at most `server_retry_s` seconds; return its
        body.

        Args:
            name: name of the operation; empty for the greeting.
            send: function that sends the request.
            backoff_s: pauses in seconds before the retries. Except for the greeting, the last one
                is repeated.
        """
        start, paused_s, number = clock.monotonic(), 0.0, 0
        while True:
            pause = backoff_s[min(number, len(backoff_s) - 1)]
            try:
                body = self._read(name, await send())
            except StoreUnreachableError as error:
                limit_s = self._retry_s
                waited_s = max(paused_s, clock.monotonic() - start)
                # A further pause must end in time.
                is_last = number >= len(backoff_s) and (not name or waited_s + pause > limit_s)
                if is_last or waited_s > limit_s:
                    raise
                now = clock.monotonic()
                if pause >= _WARN_FROM_S and now - self._warned_at >= _WARN_INTERVAL_S:
                    # once for all operations: on a full disk, reads succeed between failed writes
                    self._warned_at = now
                    log.warning("retrying for up to %g s: %s", limit_s, error)
                # jitter, because all clients of a server that restarts would retry at once
                paused_s += pause
                number += 1
                await _sleep(pause * random.uniform(0.75, 1.25))
            else:
                return body

    @property
    def _retry_s(self) -> float:
        """Seconds for which a request is retried.

        A long time, set by `set_patience`, is shortened to the default once the store is closed.
        """
        limit_s = self._timings.server_retry_s
        return min(limit_s, StoreTimings().server_retry_s) if self._is_closed else limit_s

    async def _send_batch(self, items: Sequence[tuple[str, bytes]]) -> Sequence[Response]:
        timeout_s = self._timings.read_timeout_s
        if len(items) == 1:
            [(name, body)] = items
            return [await self._send("POST", f"/{name}", body, timeout_s)]
        response = await self._send("POST", "", rpc.encode(items), timeout_s)
        if not response.protocol or response.status != 200:
            return [response] * len(items)
        answers = rpc.decode(_batch_decoder, response.body, "the answers to a batch")
        return [response._replace(status=status, body=body) for status, body in answers]

    async def _send(
        self, method: str, path: str, body: bytes | None, read_timeout_s: float
    ) -> Response:
        """Send one request. Raises `StoreUnreachableError` if a retry may help."""
        try:
            async with self._session.request(
                method,
                f"{self._address.base}{rpc.PATH}{path}",
                data=io.BytesIO(body) if body and len(body) > _LARGE_BODY else body,
                allow_redirects=False,  # the key would be sent too
                timeout=aiohttp.ClientTimeout(
                    REQUEST_TIMEOUT_S, sock_read=read_timeout_s, sock_connect=CONNECT_TIMEOUT_S
                ),
            ) as response:
                return Response(response.status, response.headers, await response.read())
        except aiohttp.ClientConnectorCertificateError as error:
            code = getattr(error.certificate_error, "verify_code", 0)
            problem, remedy = _CERTIFICATE_PROBLEMS.get(code, _UNTRUSTED)
            raise StoreError(
                f"store {self._address.url}: the server's certificate {problem} ({error}): {remedy}"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if any(name in str(error) for name in _PLAIN_HTTP):
                raise StoreError(
                    f"store {self._address.url}: the server speaks http, not https: write http:// "
                    "for `lightspan serve` itself, or use the port of the TLS proxy in front of it"
                ) from error
            reason = str(getattr(error, "os_error", error)) or type(error).__name__
            check = "check that `lightspan serve --store …` runs there"
            if self._address.is_joined:  # the tunnel is open while its runner lives
                is_closed = isinstance(error, aiohttp.ClientConnectorError)
                ended = "the `lightspan runner --join` of this machine that led there has ended"
                check = ended if is_closed else "check that the trainer runs and can be reached"
            raise StoreUnreachableError(
                f"store {self._address.url} cannot be reached ({reason}): {check}"
            ) from error

    def _read(self, name: str, response: Response) -> bytes:
        """Return the body of a successful response.

        Args:
            name: name of the operation; empty for the greeting.
            response: the response.

        Raises:
            StoreUnreachableError: a retry may help.
            LightspanError: the store's error, or the reason why there is no answer.
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
                failure = rpc.decode(_failure_decoder, response.body, "the error")
            except DataError:
                return StoreError(f"{where}: the server answered with status {response.status}")
            if response.status == 401 and self._address.is_joined:
                return StoreError(
                    f"{where}: the training there has another token: copy the line that its "
                    "trainer prints again (each run's folder has its own token)"
                )
            if response.status == 401:
                key = f"the key in ${self._address.key_variable}" if self._key else "no key"
                return StoreError(f"{where}: {failure.message} (sent: {key})")
            if response.status == 403 and self._key and not self._address.is_joined:
                return StoreError(
                    f"{where}: {failure.message} (sent: the key in ${self._address.key_variable}; "
                    "set it to the key of a role that is named here)"
                )
            return failure.error(where)
        return StoreError(f"{where}: a proxy in front of it answered with {response.status}")

    def _no_server(self, reason: str) -> StoreFormatError:
        return StoreFormatError(
            f"store {self._address.url}: there is no `lightspan serve --store …` of this version "
            f"({reason}); the server of a policy is no store"
        )

    def _other_version(self, protocol: str, version: str) -> StoreFormatError:
        theirs = f"the server's lightspan {version}" if version else "the server's lightspan"
        return StoreFormatError(
            f"store {self._address.url}: {theirs} speaks protocol {protocol}, this one "
            f"({__version__} of {sys.executable}) speaks {PROTOCOL_VERSION}: install the same "
            "version of lightspan on both sides"
        )


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # These reports are no failures: aiohttp reports a program that exits without closing its store,
    # asyncio reports the error of a request that its caller and `stop` cancelled.
    is_expected = isinstance(context.get("exception"), StoreClosedError)
    if not is_expected and not context.keys() & {"client_session", "connector"}:
        loop.default_exception_handler(context)
