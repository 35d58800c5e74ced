"""A store that another process serves over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, ParamSpec, TypeVar, cast

from lightspan.errors import (
    ConfigError,
    DataError,
    StoreError,
    StoreUnreachableError,
    how_to_install,
)
from lightspan.schema import clock
from lightspan.schema.images import Image
from lightspan.schema.records import AttemptRef, Claim, Report
from lightspan.schema.spans import Span
from lightspan.stores._process_local import OpenedStore
from lightspan.stores.protocol import Changes, Store, StoreCapabilities
from lightspan.stores.timings import StoreTimings
from lightspan_gateway.remote_store.rpc import OPERATIONS, POLL_S, Arguments, Operation
from lightspan_gateway.remote_store.url import read_address

try:
    from lightspan_gateway.remote_store.client import ServerConnection
except ImportError as error:
    raise ConfigError(
        f"a store at an http URL needs aiohttp ({error}): {how_to_install('http')}"
    ) from error

_IMAGES: Final = 8
"""Maximum number of images in one answer."""

P = ParamSpec("P")
R = TypeVar("R")


def _remote(method: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return a method of `RemoteStore` that runs the `Store` method `method` on the server."""
    operation = OPERATIONS[method.__name__]

    @functools.wraps(method)
    async def call(*args: P.args, **named: P.kwargs) -> R:
        store, *positional = args
        arguments = operation.bind(*positional, **named)
        return cast(R, await cast(RemoteStore, store)._call(operation, arguments))

    return call


class RemoteStore(OpenedStore[ServerConnection]):
    """A store at an `http://` or `https://` URL. Open it in each process that uses it.

    While the server is unreachable or busy, every operation is retried for up to a minute;
    operations are idempotent.

    Args:
        url: `https://host:port`, or `…?api_key_env=NAME` for a key in another variable than
            `LIGHTSPAN_STORE_KEY`.
        timings: times and limits; None for the defaults.

    Raises:
        ConfigError: the URL is invalid, or the variable that it names is not set.
    """

    def __init__(self, url: str, *, timings: StoreTimings | None = None) -> None:
        self._address = read_address(url)
        super().__init__(self._address.url)
        self._key = self._address.key()
        self._timings = timings or StoreTimings()
        # every served store has these capabilities; the greeting adds others
        self._capabilities = StoreCapabilities(durable=True, multi_process=True)

    def set_patience(self, seconds: float) -> None:
        """Retry operations for `seconds` while the server is unreachable. Call it before `open`."""
        self._timings = dataclasses.replace(self._timings, server_retry_s=seconds)

    @property
    def capabilities(self) -> StoreCapabilities:
        return self._capabilities

    @property
    def url(self) -> str:
        """The URL without the key."""
        return self._address.url

    def _start(self) -> ServerConnection:
        connection = ServerConnection(self._address, self._key, self._timings)
        try:
            greeting = connection.greet()
        except BaseException:
            connection.stop()
            raise
        self._capabilities = StoreCapabilities(
            durable=True, multi_process=True, power_loss=greeting.power_loss
        )
        return connection

    async def _call(self, operation: Operation, arguments: Arguments) -> Any:
        connection = self._opened
        if not operation.only_reads:
            self._check_writable()
        lease_s = arguments["lease_s"] if operation.name == "heartbeat" else None
        body = await connection.call(operation, operation.encode(arguments), lease_s)
        return operation.read_answer(body)

    # --- the operations -------------------------------------------------------------------
    put_resources = _remote(Store.put_resources)
    get_resources = _remote(Store.get_resources)
    allot_version = _remote(Store.allot_version)
    policy_versions = _remote(Store.policy_versions)
    enqueue = _remote(Store.enqueue)
    start = _remote(Store.start)
    claim = _remote(Store.claim)
    heartbeat = _remote(Store.heartbeat)
    report = _remote(Store.report)
    _finish = _remote(Store.finish)
    expire = _remote(Store.expire)
    cancel = _remote(Store.cancel)
    prune = _remote(Store.prune)
    rollouts = _remote(Store.rollouts)
    summaries = _remote(Store.summaries)
    search = _remote(Store.search)
    count = _remote(Store.count)
    announce = _remote(Store.announce)
    withdraw = _remote(Store.withdraw)
    peers = _remote(Store.peers)
    attempts = _remote(Store.attempts)
    attempt = _remote(Store.attempt)
    mark_damaged = _remote(Store.mark_damaged)
    add_spans = _remote(Store.add_spans)
    add_calls = _remote(Store.add_calls)
    _add_images = _remote(Store.add_images)
    _images = _remote(Store.images)
    mark_call = _remote(Store.mark_call)
    spans = _remote(Store.spans)
    token_records = _remote(Store.token_records)

    async def finish(self, report: Report, spans: Sequence[Span]) -> bool:
        try:
            return await self._finish(report, spans)
        except StoreUnreachableError:
            raise
        except (
            DataError,
            StoreError,
        ):  # perhaps a span is invalid or too large
            return await super().finish(report, spans)

    async def add_images(self, attempt: AttemptRef, images: Sequence[Image]) -> None:
        # one request each, because the server limits the size of a request
        await asyncio.gather(*(self._add_images(attempt, [image]) for image in images))

    async def images(self, digests: Sequence[str]) -> dict[str, Image]:
        found: dict[str, Image] = {}
        for start in range(0, len(digests), _IMAGES):
            found |= await self._images(digests[start : start + _IMAGES])
        return found

    async def watch(
        self, cursor: int = 0, *, run_id: str | None = None, timeout_s: float = 0.0
    ) -> Changes:
        arguments = {"cursor": cursor, "run_id": run_id}
        return cast(Changes, await self._poll("watch", arguments, timeout_s))

    async def await_work(
        self, run_ids: Sequence[str] | None = None, *, timeout_s: float = 0.0
    ) -> bool:
        return cast(bool, await self._poll("await_work", {"run_ids": run_ids}, timeout_s))

    async def _poll(self, name: str, arguments: Arguments, timeout_s: float) -> Any:
        """Repeat a long poll until its answer is not empty, or the timeout is over."""
        deadline = clock.monotonic() + timeout_s
        while True:
            arguments["timeout_s"] = min(max(0.0, deadline - clock.monotonic()), POLL_S)
            answer = await self._call(OPERATIONS[name], arguments)
            if getattr(answer, "rollouts", answer) or clock.monotonic() >= deadline:
                return answer

    async def claim_of_token(self, call_token: str) -> Claim | None:
        if not call_token.isascii():  # no token of lightspan
            return None
        arguments = {"call_token": call_token}
        return cast(Claim | None, await self._call(OPERATIONS["claim_of_token"], arguments))
