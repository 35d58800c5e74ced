"""What is asked of a server is sent, and sent again where no answer came, until one comes.

Every request may be sent twice: writes go by ids (`stores.protocol.Store`). So a lost answer, a
server that is started again, a proxy between that gives up, and a server that is busy look alike to
whoever asks: it takes longer. The one schedule of pauses is `PAUSES_S`; who is told when to come
again (`Retry-After`) comes then.

An event loop of its own, in a thread of its own, has the sockets: a store is used from any event
loop, and outlives each. What is asked in one turn of a loop goes to that thread together,
and what is answered together comes back together (`handovers`): so the tasks of a runner that were
answered together ask together again, and travel together.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - else a thread imports it: see _sql/statements.py
import logging
import os
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import urljoin, urlsplit

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
from lightspan.schema.conventions import HEADER_PROTOCOL, HEADER_VERSION, PROTOCOL_VERSION
from lightspan.schema.texts import clean_text
from lightspan.stores.protocol import PAUSES_S
from lightspan.stores.remote.address import RemoteAddress
from lightspan.stores.remote.batches import Batches, Item
from lightspan.stores.remote.errors import Failure
from lightspan.stores.remote.exchanges import Exchanges, NoAnswer, SpeaksHttp, Untrusted
from lightspan.stores.remote.handovers import Handovers, Question
from lightspan.stores.remote.operations import (
    CONTENT_TYPE,
    PATH,
    POLL_S,
    Greeting,
    Operation,
    decoded,
    encode_together,
    read_answered,
)

log = logging.getLogger(__name__)

ANSWER_S: Final = 30.0
"""How long a server may say nothing, once it has the request, beside what it was told to wait. A
connection that is open at this end only is known by that."""
PATIENCE_S: Final = 60.0
"""After so long no request is sent again, however many pauses there are left."""
LONGEST_WAIT_S: Final = 60.0
"""Of what a server may ask a client to wait before it comes again."""
OPENING_PAUSES_S: Final = PAUSES_S[:3]
"""For the greeting: whoever mistypes an address is not to wait a minute for that to be said."""
_TOLD_FROM_S: Final = 8.0
"""The pause before which somebody who looks on is told of it: none of those of the greeting."""
SHORTEST_SILENCE_S: Final = 1.0
"""Of a heartbeat, however short its lease."""
MOST_ALONE: Final = 32
"""Requests of one process, but for batches and those that wait for a change: a server lets in a few
hundred, of all its clients. Whoever comes after these waits here."""
_BUSY: Final = frozenset({429, 502, 503, 504})
_PROTOCOL: Final = HEADER_PROTOCOL.lower()
_VERSION: Final = HEADER_VERSION.lower()
_sleep = asyncio.sleep
_failure_decoder = msgspec.msgpack.Decoder(Failure)
_greeting_decoder = msgspec.msgpack.Decoder(Greeting)


class NotAnswered(Exception):
    """There may be an answer next time.

    Args:
        error: what to raise if there is no next time.
        wait_s: what the server asks to wait.
    """

    def __init__(self, error: StoreUnreachableError, wait_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_s = wait_s


class Received(NamedTuple):
    """A response."""

    status: int
    is_ours: bool
    """Whether a lightspan server made it, and no proxy in between."""
    protocol: str
    wait_s: float
    body: bytes
    location: str = ""
    """Where it sends whoever asks, if it does."""
    version: str = ""
    """Of the server's lightspan, if it says so."""


class ServerConnection:
    """One process's way to a server.

    Args:
        address: of the store.
        key: empty if there is none.
    """

    def __init__(self, address: RemoteAddress, key: str) -> None:
        self.pid: Final = os.getpid()
        self._address = address
        self._key = key
        try:
            self._exchanges = Exchanges(address.base, self._headers())
        except ValueError as error:
            raise StoreError(f"store {address.url} is no address: {error}") from error
        self._loop = asyncio.new_event_loop()
        self._asked: set[asyncio.Task[bytes]] = set()
        self._waiting: set[asyncio.Task[bytes]] = set()
        """Those of `_asked` that wait for a change."""
        self._closing = False
        self._is_told = False
        """Whether it is known by its log that the server does not answer."""
        self._turns = asyncio.Semaphore(MOST_ALONE)
        self._batches = Batches(self._sent_together)
        self._handovers = Handovers(self._loop, self._begin)
        self._thread = threading.Thread(target=self._run, name="lightspan-store-http", daemon=True)
        self._thread.start()

    def greet(self) -> Greeting:
        """Ask the server who it is. Blocks.

        Raises:
            StoreUnreachableError: nobody answers, or only that it is too busy.
            StoreError: it does not take the key, or is no such server.
        """
        return asyncio.run_coroutine_threadsafe(self._greeting(), self._loop).result()

    def ask(
        self, operation: Operation, body: bytes, lease_s: float | None = None
    ) -> asyncio.Future[bytes]:
        """Send a request; the future, of the running loop, has the body of its answer, or what is
        to be raised.

        Args:
            operation: what is asked.
            body: with its arguments.
            lease_s: of a heartbeat, which has no time to lose.
        """
        return self._handovers.asked(operation, body, lease_s)

    def stop(self) -> None:
        """Wait for what was asked, but for who waits for a change, and let go of the sockets."""
        self._handovers.close(f"store {self._address.url} is closed: open it first")
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- in the thread --------------------------------------------------------------------
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _begin(self, asked: Question) -> asyncio.Task[bytes]:
        if asked.lease_s is not None:
            return self._loop.create_task(self._beat(asked.body, asked.lease_s))
        return self._loop.create_task(self._answer(asked.operation, asked.body))

    async def _close(self) -> None:
        self._closing = True
        await asyncio.sleep(0)  # what was handed over last has begun, and is waited for
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        self._handovers.give_back()
        await self._exchanges.close()

    async def _greeting(self) -> Greeting:
        received = await self._patiently(self._greeted, Item("", b""), OPENING_PAUSES_S)
        try:
            greeting = decoded(_greeting_decoder, received, "its greeting")
        except DataError as error:
            raise self._no_server(str(error)) from error
        if greeting.protocol != PROTOCOL_VERSION:
            raise self._other_version(str(greeting.protocol), greeting.lightspan)
        return greeting

    async def _answer(self, operation: Operation, body: bytes) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        self._asked.add(task)
        if operation.waits:
            self._waiting.add(task)
        silence_s = ANSWER_S + (POLL_S if operation.waits else 0.0)
        try:
            if operation.joins:
                return await self._patiently(self._batches.sent, Item(operation.name, body))
            async with nullcontext() if operation.waits else self._turns:
                send = partial(self._sent_alone, silence_s=silence_s)
                # who finds no room to wait for work comes again, and claims, as soon as it is told
                pauses = (0.0,) if operation.name == "await_work" else PAUSES_S
                return await self._patiently(send, Item(operation.name, body), pauses)
        except asyncio.CancelledError:
            if self._closing and operation.waits:
                raise StoreClosedError(
                    f"store {self._address.url} was closed while somebody waited for a change"
                ) from None
            raise
        finally:
            self._asked.discard(task)
            self._waiting.discard(task)

    async def _beat(self, body: bytes, lease_s: float) -> bytes:
        """A heartbeat: it waits for nobody's spans, is silent for a quarter of its lease at most,
        and is sent again on a connection of its own: those that are open may all be so at this end
        only. Once the lease is over there is nothing to keep."""
        task = asyncio.current_task()
        assert task is not None
        self._asked.add(task)
        silence_s = min(ANSWER_S, max(SHORTEST_SILENCE_S, lease_s / 4))
        tries = 0

        async def send(item: Item) -> Received:
            nonlocal tries
            tries += 1
            path, anew = f"/{item.name}", tries > 1
            return await self._sent("POST", path, item.body, silence_s, anew=anew)

        try:
            return await self._patiently(send, Item("heartbeat", body))
        finally:
            self._asked.discard(task)

    async def _patiently(
        self,
        send: Callable[[Item], Awaitable[Received]],
        item: Item,
        pauses: Sequence[float] = PAUSES_S,
    ) -> bytes:
        """The body of the answer, however often it takes to ask for it."""
        begun = clock.monotonic()
        for pause in (*pauses, None):
            try:
                answer = self._read(item.name, await send(item))
            except NotAnswered as missing:
                if pause is None or clock.monotonic() - begun > PATIENCE_S:
                    raise missing.error from missing.__cause__
                if pause >= _TOLD_FROM_S and not self._is_told:
                    self._is_told = True  # once, however many ask
                    log.warning("asking again, for up to a minute: %s", missing.error)
                # apart, or all clients of a server that comes back would come at once
                await _sleep(max(missing.wait_s, pause * random.uniform(0.75, 1.25)))
            else:
                self._is_told = False
                return answer
        raise AssertionError("the last pause is None")

    async def _greeted(self, item: Item) -> Received:
        return await self._sent("GET", "", None, ANSWER_S)

    async def _sent_alone(self, item: Item, silence_s: float = ANSWER_S) -> Received:
        return await self._sent("POST", f"/{item.name}", item.body, silence_s)

    async def _sent_together(self, items: Sequence[Item]) -> Sequence[Received]:
        """Raises `NotAnswered` for all of them, and where there is no such server."""
        if len(items) == 1:
            return [await self._sent_alone(items[0], ANSWER_S)]
        received = await self._sent("POST", "", encode_together(items), ANSWER_S)
        if not received.is_ours or received.status != 200:
            return [received] * len(items)
        answered = read_answered(received.body)
        return [received._replace(status=status, body=body) for status, body in answered]

    async def _sent(
        self, method: str, path: str, body: bytes | None, silence_s: float, *, anew: bool = False
    ) -> Received:
        """One request and its response. Raises `NotAnswered`."""
        try:
            status, headers, answer = await self._exchanges.ask(
                method, f"{PATH}{path}", body, silence_s=silence_s, anew=anew
            )
        except Untrusted as error:
            raise StoreError(
                f"store {self._address.url}: the server's certificate is not trusted ({error}); "
                "name your authority's in SSL_CERT_FILE"
            ) from error
        except SpeaksHttp as error:
            raise StoreError(
                f"store {self._address.url}: who answers there speaks http, not https: "
                "`lightspan serve` itself does, so write http://, or name the port of the proxy "
                "with TLS in front of it"
            ) from error
        except NoAnswer as error:
            raise NotAnswered(
                StoreUnreachableError(
                    f"store {self._address.url} cannot be reached ({error}): see that `lightspan "
                    "serve --store …` runs there"
                )
            ) from error
        protocol = headers.get(_PROTOCOL, "")
        return Received(
            status,
            bool(protocol),
            protocol,
            _wait_s(headers.get("retry-after", "")),
            answer,
            headers.get("location", ""),
            clean_text(headers.get(_VERSION, ""))[:40],
        )

    def _headers(self) -> dict[str, str]:
        """Of every request. Where they go, the key goes: nobody is followed elsewhere."""
        headers = {HEADER_PROTOCOL: str(PROTOCOL_VERSION), "Content-Type": CONTENT_TYPE}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _read(self, name: str, received: Received) -> bytes:
        """The body of a good answer to an operation; to the greeting, which has no name.

        Raises:
            NotAnswered: it may be one next time.
            LightspanError: what the store says, or why there is none.
        """
        status = received.status
        if received.is_ours and status == 200:
            return received.body
        if status in _BUSY:
            refused = StoreUnreachableError(str(self._refused(name, received)))
            raise NotAnswered(refused, received.wait_s)
        if received.is_ours and received.protocol != str(PROTOCOL_VERSION):
            raise self._other_version(received.protocol, received.version)
        if 300 <= status < 400 and received.location:
            raise self._sent_away(received)
        if received.is_ours or status == 413:
            raise self._refused(name, received)
        raise self._no_server(f"it answered with status {status}")

    # --- what went wrong ------------------------------------------------------------------
    def _refused(self, name: str, received: Received) -> LightspanError:
        """What an answer says that is none."""
        where = f"store {self._address.url}{f', {name}' if name else ''}"
        if received.is_ours:
            try:
                failure = decoded(_failure_decoder, received.body, "what went wrong")
            except DataError:
                return StoreError(f"{where}: the server answered with status {received.status}")
            if received.status == 401:
                return StoreError(f"{where}: {failure.message} (sent: {self._sent_key()})")
            return failure.error(where)
        if received.status == 413:
            return StoreError(
                f"{where}: a proxy in front of it refuses a body of this size (413): let it pass "
                "larger ones, or ask for less at once"
            )
        return StoreError(f"{where}: a proxy in front of it answers with {received.status}")

    def _sent_key(self) -> str:
        """Which key was sent, by its name."""
        return f"the key in ${self._address.key_variable}" if self._key else "no key"

    def _sent_away(self, received: Received) -> StoreError:
        """Of a redirect, which is not followed: the key would go with it."""
        place = urlsplit(urljoin(self._address.base, clean_text(received.location)))
        shown = f"{place.scheme}://{place.netloc.rpartition('@')[2]}"
        return StoreError(
            f"store {self._address.url}: the server sends clients on to {shown:.200} (status "
            f"{received.status}), and a key goes nowhere by itself: if that is right, open the "
            "store by that address"
        )

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


def _wait_s(text: str) -> float:
    """The seconds of a `Retry-After`; 0 where there is none that can be read."""
    return min(float(text), LONGEST_WAIT_S) if text.isdecimal() and text.isascii() else 0.0
