"""SQLiteStore: one file, any number of processes on one machine. The embedded default.

What is written at the same time is committed together, by the event loop itself if it is little and
by a thread if it is more; what one task alone writes, at once (`_writer`). Reads have a connection
and a thread of their own and, the file being in WAL mode, wait for nobody.
What was acknowledged survives `kill -9`; with `power_loss=True` it survives a power loss too.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, Self, TypeVar

from lightspan.errors import StoreClosedError
from lightspan.records import (
    Attempt,
    AttemptRef,
    CallOutcome,
    Claim,
    Mode,
    Peer,
    Report,
    Rollout,
    RolloutState,
    RolloutStatus,
    TokenRecord,
)
from lightspan.resources import NamedResources, encode_resources, resources_id
from lightspan.spans import Span
from lightspan.store import Changes, PolicyVersion, StoreCapabilities, StoredCall
from lightspan.stores._moves import Begun, ClaimRequest, check_begun
from lightspan.stores._packing import pack_call, pack_peer, pack_rollout, pack_span
from lightspan.stores._signal import Signal
from lightspan.stores._sqlite_session import CHUNK, Session, cost_of, in_chunks
from lightspan.stores._writer import Work

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_SHORTEST_POLL_S: Final = 0.002
_LONGEST_POLL_S: Final = 0.02

_inherited: Final[list[Session]] = []
"""Sessions of a parent process: never closed here, that would drop the parent's locks."""


class SQLiteStore:
    """A store in a SQLite file. Open it in each process that uses it; after a fork, again."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        power_loss: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path: Final = Path(path).absolute()
        self.capabilities: Final = StoreCapabilities(
            durable=True, multi_process=True, power_loss=power_loss
        )
        self._clock = clock
        self._signal = Signal()
        self._session: Session | None = None

    @property
    def url(self) -> str:
        option = "?power_loss=true" if self.capabilities.power_loss else ""
        return f"sqlite://{self.path}{option}"

    async def open(self) -> None:
        if self._session is not None and self._session.pid != os.getpid():
            _inherited.append(self._session)
            self._session = None
        if self._session is None:
            self._session = await asyncio.to_thread(self._start)

    def _start(self) -> Session:
        power_loss = self.capabilities.power_loss
        return Session(self.path, power_loss, self._clock, self._signal.notify)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.pid == os.getpid():
            await asyncio.to_thread(session.stop)
        self._signal.notify()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def _opened(self) -> Session:
        session = self._session
        if session is None:
            raise StoreClosedError(f"store {self.path} is closed: open it first")
        if session.pid != os.getpid():
            raise StoreClosedError(
                f"store {self.path} was opened before this process was forked: open it again here"
            )
        return session

    async def _read(self, query: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a query of the reader in its thread."""
        return await asyncio.wrap_future(self._opened.read(lambda: query(*args, **kwargs)))

    async def _write(
        self,
        work: Work[T, R],
        items: Sequence[T],
        *,
        size: Callable[[T], int] = lambda _: 0,
        check: Callable[[Sequence[T]], object] | None = None,
    ) -> list[R]:
        """Write items chunk by chunk, each chunk in one short transaction.

        `work` refuses a chunk as a whole; where there are several, `check` refuses all of them
        before the first is written.
        """
        session = self._opened
        if len(items) == 1:
            return await session.write(work, items, cost_of(size(items[0])))
        chunks = list(in_chunks(items, size))
        if check is not None and len(chunks) > 1:
            await self._read(check, items)
        answers: list[R] = []
        for chunk, cost in chunks:
            answers += await session.write(work, chunk, cost)
        return answers

    # --- resources and policies -----------------------------------------------------------
    async def put_resources(self, resources: NamedResources) -> str:
        name = resources_id(resources)
        await self._write(self._opened.tables.put_resources, [(name, encode_resources(resources))])
        return name

    async def get_resources(self, resources_id: str) -> NamedResources:
        return await self._read(self._opened.reader.resources, resources_id)

    async def allot_version(self, policy: str, run_id: str = "", step: int = 0) -> int:
        work = self._opened.tables.allot_versions
        [version] = await self._write(work, [(policy, run_id, step)])
        return version

    async def policy_versions(self, policy: str) -> list[PolicyVersion]:
        return await self._read(self._opened.reader.policy_versions, policy)

    # --- rollouts -------------------------------------------------------------------------
    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        packed = [pack_rollout(rollout) for rollout in rollouts]
        session = self._opened
        await self._write(
            session.enqueue, packed, size=lambda item: len(item.body), check=session.check_new
        )

    async def start(self, claims: Sequence[Claim]) -> None:
        begun = [Begun(pack_rollout(claim.rollout), claim.attempt) for claim in claims]
        await self._write(
            self._opened.start, begun, size=lambda item: len(item.new.body), check=check_begun
        )

    async def claim(
        self, runner_id: str, slots: int, lease_s: float, run_id: str | None = None
    ) -> list[Claim]:
        claims: list[Claim] = []
        while (wanted := min(slots - len(claims), CHUNK)) > 0:
            request = ClaimRequest(runner_id, wanted, lease_s, run_id)
            [found] = await self._write(self._opened.claim, [request])
            if found is None:  # leases had run out; there may be more
                continue
            claims += found
            if len(found) < wanted:
                break
        return claims

    async def heartbeat(self, attempts: Sequence[AttemptRef], lease_s: float) -> list[AttemptRef]:
        items = [(ref, lease_s) for ref in attempts]
        mine = await self._write(self._opened.heartbeat, items)
        return [ref for ref, is_mine in zip(attempts, mine, strict=True) if not is_mine]

    async def report(self, reports: Sequence[Report]) -> list[bool]:
        session = self._opened
        return await self._write(session.report, reports, check=session.check_reports)

    async def expire(self) -> int:
        total = 0
        while True:
            [lost] = await self._write(self._opened.expire, [CHUNK])
            total += lost
            if lost < CHUNK:
                return total

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        session = self._opened
        check = session.reader.check_rollouts
        return sum(await self._write(session.cancel, rollout_ids, check=check))

    async def rollouts(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        run_id: str | None = None,
        mode: Mode | None = None,
        step: int | None = None,
        status: Sequence[RolloutStatus] | None = None,
        limit: int | None = None,
    ) -> list[RolloutState]:
        filters = {"run_id": run_id, "mode": mode, "step": step, "status": status}
        return await self._read(self._opened.reader.rollouts, rollout_ids, limit, filters)

    async def watch(
        self, cursor: int = 0, *, run_id: str | None = None, timeout_s: float = 0.0
    ) -> Changes:
        deadline = time.monotonic() + timeout_s
        pause = _SHORTEST_POLL_S
        with self._signal.waiter() as waiter:
            while True:
                changes = await self._read(self._opened.reader.changes, cursor, run_id)
                left = deadline - time.monotonic()
                if changes.rollouts or left <= 0:
                    return changes
                await waiter.wait(min(left, pause))
                pause = min(1.5 * pause, _LONGEST_POLL_S)

    async def count(self, run_id: str | None = None) -> dict[RolloutStatus, int]:
        return await self._read(self._opened.reader.count, run_id)

    # --- who works with it ----------------------------------------------------------------
    async def announce(self, peer: Peer) -> None:
        await self._write(self._opened.announce, [(peer.peer_id, pack_peer(peer))])

    async def withdraw(self, peer_id: str) -> None:
        await self._write(self._opened.tables.drop_peers, [peer_id])

    async def peers(self) -> list[Peer]:
        return await self._read(self._opened.reader.peers, self._clock())

    # --- attempts and what they did -------------------------------------------------------
    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        return await self._read(self._opened.reader.attempts, rollout_ids)

    async def attempt(self, attempt_id: str) -> Attempt:
        return await self._read(self._opened.reader.attempt, attempt_id)

    async def claim_of_token(self, call_token: str) -> Claim | None:
        if not call_token.isascii():  # whatever a client sent; SQLite takes UTF-8 only
            return None
        return await self._read(self._opened.reader.claim_of_token, call_token)

    async def mark_damaged(self, attempt_id: str, reason: str) -> None:
        await self._write(self._opened.mark_damaged, [(attempt_id, reason)])

    async def add_spans(self, attempt: AttemptRef, spans: Sequence[Span]) -> int:
        packed = [pack_span(attempt, span) for span in spans]
        session = self._opened
        if not packed:
            await self.attempt(attempt.attempt_id)
        late = await self._write(
            session.tables.add_spans, packed, size=lambda span: span.size, check=session.check_spans
        )
        return sum(late)

    async def add_calls(self, calls: Sequence[StoredCall]) -> list[bool]:
        packed = [pack_call(call) for call in calls]
        session = self._opened
        return await self._write(
            session.tables.add_calls, packed, size=lambda call: call.size, check=session.check_calls
        )

    async def mark_call(self, attempt_id: str, call_id: str, outcome: CallOutcome) -> None:
        await self._write(self._opened.tables.mark_calls, [(attempt_id, call_id, outcome)])

    async def spans(self, attempt_ids: Sequence[str]) -> dict[str, list[Span]]:
        return await self._read(self._opened.reader.spans, attempt_ids)

    async def token_records(self, attempt_ids: Sequence[str]) -> dict[str, list[TokenRecord]]:
        return await self._read(self._opened.reader.token_records, attempt_ids)
