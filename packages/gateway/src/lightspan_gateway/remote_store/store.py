"""RemoteStore: a store that another process serves over HTTP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from lightspan.errors import ConfigError, DataError, how_to_install
from lightspan.schema import clock
from lightspan.schema.records import Claim, Report
from lightspan.schema.spans import Span
from lightspan.stores._process_local import OpenedStore
from lightspan.stores._validation import check_integer, check_lease, check_timeout
from lightspan.stores.protocol import Changes, Store, StoreCapabilities
from lightspan_gateway.remote_store.rpc import OPERATIONS, POLL_S, Arguments, Operation
from lightspan_gateway.remote_store.url import read_address

try:
    from lightspan_gateway.remote_store.client import ServerConnection
except ImportError as error:
    raise ConfigError(
        f"a store that is served over HTTP needs aiohttp ({error}): {how_to_install('http')}"
    ) from error

P = ParamSpec("P")
R = TypeVar("R")


def _asked(method: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The same operation, asked of the server."""
    operation = OPERATIONS[method.__name__]

    @functools.wraps(method)
    async def ask(*args: P.args, **named: P.kwargs) -> R:
        store, *given = args
        arguments = operation.bind(*given, **named)
        if operation.name == "heartbeat":
            check_lease(arguments["lease_s"])  # by which it is told how long to wait
        return cast(R, await cast(RemoteStore, store)._ask(operation, arguments))

    return ask


class RemoteStore(OpenedStore[ServerConnection]):
    """A store behind HTTP. Open it in each process that uses it; after a fork, again.

    Every operation is sent again for up to a minute while the server is out of reach or busy;
    nothing is done twice by that.

    Args:
        url: `https://host:port`, or `…?api_key_env=NAME` for a key in another variable than
            `LIGHTSPAN_STORE_KEY`.

    Raises:
        ConfigError: the URL cannot be read, or the variable that it names is not set.
    """

    def __init__(self, url: str) -> None:
        self._address = read_address(url)
        super().__init__(self._address.url)
        self._key = self._address.key()
        # a server serves nothing that is less; how much more, it says when it is greeted
        self._capabilities = StoreCapabilities(durable=True, multi_process=True)

    @property
    def capabilities(self) -> StoreCapabilities:
        return self._capabilities

    @property
    def url(self) -> str:
        """Without the key, which this process remembers."""
        return self._address.url

    def _start(self) -> ServerConnection:
        connection = ServerConnection(self._address, self._key)
        try:
            greeting = connection.greet()
        except BaseException:
            connection.stop()
            raise
        self._capabilities = StoreCapabilities(
            durable=True, multi_process=True, power_loss=greeting.power_loss
        )
        return connection

    async def _ask(self, operation: Operation, arguments: Arguments) -> Any:
        connection = self._opened
        lease_s = arguments["lease_s"] if operation.name == "heartbeat" else None
        asked = connection.ask(operation, operation.encode(arguments), lease_s)
        return operation.read_answer(await asked)

    # --- the operations -------------------------------------------------------------------
    put_resources = _asked(Store.put_resources)
    get_resources = _asked(Store.get_resources)
    allot_version = _asked(Store.allot_version)
    policy_versions = _asked(Store.policy_versions)
    enqueue = _asked(Store.enqueue)
    start = _asked(Store.start)
    claim = _asked(Store.claim)
    heartbeat = _asked(Store.heartbeat)
    report = _asked(Store.report)
    _finish_at_once = _asked(Store.finish)
    expire = _asked(Store.expire)
    cancel = _asked(Store.cancel)
    prune = _asked(Store.prune)
    rollouts = _asked(Store.rollouts)
    count = _asked(Store.count)
    announce = _asked(Store.announce)
    withdraw = _asked(Store.withdraw)
    peers = _asked(Store.peers)
    attempts = _asked(Store.attempts)
    attempt = _asked(Store.attempt)
    mark_damaged = _asked(Store.mark_damaged)
    add_spans = _asked(Store.add_spans)
    add_calls = _asked(Store.add_calls)
    mark_call = _asked(Store.mark_call)
    spans = _asked(Store.spans)
    token_records = _asked(Store.token_records)

    async def finish(self, report: Report, spans: Sequence[Span]) -> bool:
        try:
            return await self._finish_at_once(report, spans)
        except DataError:  # perhaps it is the spans that cannot be sent, or kept
            return await super().finish(report, spans)

    async def watch(
        self, cursor: int = 0, *, run_id: str | None = None, timeout_s: float = 0.0
    ) -> Changes:
        check_integer("cursor", cursor)
        arguments = {"cursor": cursor, "run_id": run_id}
        return cast(Changes, await self._poll("watch", arguments, timeout_s))

    async def await_work(
        self, run_ids: Sequence[str] | None = None, *, timeout_s: float = 0.0
    ) -> bool:
        return cast(bool, await self._poll("await_work", {"run_ids": run_ids}, timeout_s))

    async def _poll(self, name: str, arguments: Arguments, timeout_s: float) -> Any:
        """Ask again until there is an answer that says something, or the time is over."""
        check_timeout(timeout_s)
        deadline = clock.monotonic() + timeout_s
        while True:
            arguments["timeout_s"] = min(max(0.0, deadline - clock.monotonic()), POLL_S)
            answer = await self._ask(OPERATIONS[name], arguments)
            if getattr(answer, "rollouts", answer) or clock.monotonic() >= deadline:
                return answer

    async def claim_of_token(self, call_token: str) -> Claim | None:
        if not call_token.isascii():  # whatever a client sent, it is no token of ours
            return None
        arguments = {"call_token": call_token}
        return cast(Claim | None, await self._ask(OPERATIONS["claim_of_token"], arguments))
