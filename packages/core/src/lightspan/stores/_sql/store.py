"""Implement the methods of a store over SQL tables.

Writes that wait at the same time are committed together (`group_commit`). Reads use their own
connection and thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

from lightspan.schema import clock, records
from lightspan.schema.images import Image
from lightspan.schema.resources import NamedResources, encode_resources, resources_id
from lightspan.schema.spans import Span
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores import _encoding, _leases
from lightspan.stores._encoding import pack_call, pack_image, pack_peer, pack_rollout, pack_span
from lightspan.stores._process_local import OpenedStore
from lightspan.stores._signal import Signal
from lightspan.stores._sql.connections import CHUNK, OpenDatabase, cost_of, in_chunks
from lightspan.stores._sql.group_commit import GROUP_COST, Work
from lightspan.stores._state_machine import StartedRollout
from lightspan.stores.protocol import (
    PRUNED_AT_ONCE,
    SEARCH_LIMIT,
    Changes,
    PolicyVersion,
    StoredCall,
    Summaries,
)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

D = TypeVar("D", bound=OpenDatabase)

_PRUNE_CHUNK: Final = 16
"""Maximum number of rollouts that one transaction deletes."""
_SUMMARIES: Final = 1024
"""Maximum number of summaries that one query reads, each with its task. Other reads of the store
come in between."""
_SEARCHED: Final = (64, 2048)
"""Number of rollouts whose spans the first query of a search reads, and the maximum. Other reads of
the store come in between."""
_LAST: Final = 2**63 - 1
"""Number after that of every attempt."""
_WORK_POLL_INTERVALS_S: Final = (0.02, 1.0)
"""Shortest and longest time between two polls of `await_work` for rollouts that other processes
queued."""


class SQLStore(OpenedStore[D]):
    """A store in SQL tables. Open it in each process that uses it, and again after a fork.

    Args:
        name: the store's name in errors.
        poll_intervals_s: shortest and longest time, in seconds, between two polls of `watch` for
            changes by other processes.
    """

    def __init__(self, name: str, poll_intervals_s: tuple[float, float]) -> None:
        super().__init__(name)
        self._poll_intervals_s = poll_intervals_s
        self._signal = Signal()

    async def close(self) -> None:
        await super().close()
        self._signal.notify()

    def _listen(self) -> None:
        """Start to watch for changes by other processes, if the database can notify.

        By default, only polls find such changes.
        """

    async def _read(self, query: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a query of the reader in its thread and return its result."""
        return await self._opened.read(lambda: query(*args, **kwargs))

    async def _write(self, work: Work[T, R], items: Sequence[T], *, cost: int = 0) -> list[R]:
        """Write items in chunks, each in one short transaction, and return one result per item.

        Args:
            work: writes a chunk in a transaction. If it raises an error, nothing of the chunk is
                written.
            items: the items.
            cost: cost of a single item; 0 for the cost that its size gives.
        """
        database = self._opened
        self._check_writable()
        if len(items) == 1:
            return await database.write(work, items, cost or cost_of(items[0]))
        answers: list[R] = []
        for chunk, cost in in_chunks(items):
            answers += await database.write(work, chunk, cost)
        return answers

    # --- resources and policies -----------------------------------------------------------
    async def put_resources(self, resources: NamedResources) -> str:
        name = resources_id(resources)
        await self._write(self._opened.adding.put_resources, [(name, encode_resources(resources))])
        return name

    async def get_resources(self, resources_id: str) -> NamedResources:
        return await self._read(self._opened.reader.resources, resources_id)

    async def allot_version(
        self, policy: str, run_id: str = "", step: int = 0, *, request_id: str | None = None
    ) -> int:
        work = self._opened.moving.allot_versions
        [version] = await self._write(work, [(policy, run_id, step, request_id)])
        return version

    async def policy_versions(self, policy: str) -> list[PolicyVersion]:
        return await self._read(self._opened.reader.policy_versions, policy)

    # --- rollouts -------------------------------------------------------------------------
    async def enqueue(self, rollouts: Sequence[records.Rollout]) -> None:
        await self._write(self._opened.enqueue, [pack_rollout(rollout) for rollout in rollouts])

    async def start(self, claims: Sequence[records.Claim]) -> None:
        starts = [StartedRollout(pack_rollout(claim.rollout), claim.attempt) for claim in claims]
        await self._write(self._opened.start, starts)

    async def claim(
        self,
        runner_id: str,
        slots: int,
        lease_s: float,
        run_id: str | None = None,
        idle: bool = True,
        *,
        request_id: str | None = None,
    ) -> list[records.Claim]:
        unique = request_id or records.new_id("claim")
        is_repeatable = request_id is not None
        claim = _leases.ClaimRequest(runner_id, slots, lease_s, run_id, idle, unique, is_repeatable)
        claims: list[records.Claim] = []
        count = 0
        while True:
            part = claim.part(count, CHUNK)
            [claimed] = await self._write(self._opened.claim, [part])
            if claimed is None:  # there may be more expired leases to end first
                continue
            claims += claimed.claims
            count += claimed.total
            if claimed.total < part.slots or count >= slots:
                return claims

    async def heartbeat(
        self, attempts: Sequence[records.AttemptRef], lease_s: float
    ) -> list[records.AttemptRef]:
        extended = await self._write(self._opened.heartbeat, [(ref, lease_s) for ref in attempts])
        return [ref for ref, is_extended in zip(attempts, extended, strict=True) if not is_extended]

    async def report(self, reports: Sequence[records.Report]) -> list[bool]:
        return await self._write(self._opened.report, reports)

    async def expire(self) -> int:
        total = 0
        while True:
            [expired] = await self._write(self._opened.expire, [CHUNK])
            total += expired
            if expired < CHUNK:
                return total

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return sum(await self._write(self._opened.cancel, rollout_ids))

    async def rollouts(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        run_id: str | None = None,
        mode: records.Mode | None = None,
        step: int | None = None,
        status: Sequence[records.RolloutStatus] | None = None,
        limit: int | None = None,
    ) -> list[records.RolloutState]:
        filters = {"run_id": run_id, "mode": mode, "step": step, "status": status}
        return await self._read(self._opened.reader.rollouts, rollout_ids, limit, filters)

    async def summaries(
        self,
        run_id: str | None = None,
        *,
        after: int = 0,
        before: int | None = None,
        mode: records.Mode | None = None,
        newest: bool = False,
        limit: int | None = None,
    ) -> Summaries:
        filters = {"cursor": after or None, "before": before, "watched_run": run_id, "mode": mode}
        rows: dict[str, records.RolloutSummary] = {}
        cursors: list[int] = []
        while True:
            size = _SUMMARIES if limit is None else min(_SUMMARIES, limit - len(rows))
            read = self._opened.reader.summaries
            page = await self._read(read, filters, size, newest=newest)
            cursors.append(page.cursor)
            for row in page.rows:
                rows.pop(row.rollout_id, None)  # it has changed since an earlier page
                rows[row.rollout_id] = row
            if len(page.rows) < size or len(rows) == limit:
                return Summaries(cursor=cursors[0 if newest else -1], rows=list(rows.values()))
            last = page.rows[-1]
            filters |= {"before": last.position} if newest else {"cursor": last.change}

    async def search(
        self,
        text: str,
        run_id: str | None = None,
        *,
        before: str | None = None,
        limit: int = SEARCH_LIMIT,
    ) -> list[str]:
        texts = _encoding.search_texts(text)
        reader = self._opened.reader
        place = _LAST if before is None else await self._read(reader.place_of, before)
        ids, size = list[str](), _SEARCHED[0]
        while place and len(ids) < limit:
            found, place = await self._read(reader.search, texts, run_id, place, size)
            ids += found
            size = min(2 * size, _SEARCHED[1])
        return ids[:limit]

    async def watch(
        self, cursor: int = 0, *, run_id: str | None = None, timeout_s: float = 0.0
    ) -> Changes:
        return await self._poll(
            lambda: self._opened.reader.changes(cursor, run_id), timeout_s, self._poll_intervals_s
        )

    async def await_work(
        self, run_ids: Sequence[str] | None = None, *, timeout_s: float = 0.0
    ) -> bool:
        def read() -> set[str]:
            queued = self._opened.reader.queued_runs()
            return queued if run_ids is None else queued.intersection(run_ids)

        return bool(await self._poll(read, timeout_s, _WORK_POLL_INTERVALS_S))

    async def _poll(
        self, query: Callable[[], R], timeout_s: float, intervals_s: tuple[float, float]
    ) -> R:
        """Repeat a query until its result is not empty or the timeout is over; return the result.

        Args:
            query: query of the reader.
            timeout_s: maximum seconds to wait.
            intervals_s: shortest and longest time between two queries, in seconds. A change by this
                process ends a pause at once.
        """
        if timeout_s > 0:
            self._listen()
        deadline = clock.monotonic() + timeout_s
        interval, max_interval = intervals_s
        with self._signal.waiter() as waiter:
            while True:
                result = await self._read(query)
                remaining = deadline - clock.monotonic()
                if getattr(result, "rollouts", result) or remaining <= 0:
                    return result
                # Without jitter all waiting runners would query the store at the same moment.
                await waiter.wait(min(remaining, random.uniform(0.5, 1.0) * interval))
                interval = min(1.5 * interval, max_interval)

    async def count(self, run_id: str | None = None) -> dict[records.RolloutStatus, int]:
        return await self._read(self._opened.reader.count, run_id)

    async def prune(self, older_than_s: float, limit: int = PRUNED_AT_ONCE) -> int:
        total = 0
        while total < limit:
            part = min(_PRUNE_CHUNK, limit - total)
            # Deleting megabytes of spans would block the event loop, and heartbeats with it. The
            # high cost makes the writer's thread do it.
            work = self._opened.prune
            [pruned] = await self._write(work, [(older_than_s, part)], cost=GROUP_COST)
            total += pruned
            if pruned < part:
                break
        return total

    # --- peers ----------------------------------------------------------------------------
    async def announce(self, peer: records.Peer) -> None:
        await self._write(self._opened.announce, [(peer.peer_id, pack_peer(peer))])

    async def withdraw(self, peer_id: str) -> None:
        await self._write(self._opened.adding.drop_peers, [peer_id])

    async def peers(self) -> list[records.Peer]:
        return await self._read(self._opened.reader.peers)

    # --- attempts, spans and calls --------------------------------------------------------
    async def attempts(self, rollout_ids: Sequence[str]) -> list[records.Attempt]:
        return await self._read(self._opened.reader.attempts, rollout_ids)

    async def attempt(self, attempt_id: str) -> records.Attempt:
        return await self._read(self._opened.reader.attempt, attempt_id)

    async def claim_of_token(self, call_token: str) -> records.Claim | None:
        # The client may send any text. One that a database cannot take is not a call token.
        if not call_token.isascii() or "\0" in call_token:
            return None
        return await self._read(self._opened.reader.claim_of_token, call_token)

    async def mark_damaged(self, attempt_id: str, reason: str) -> None:
        await self._write(self._opened.mark_damaged, [(attempt_id, reason)])

    async def add_spans(self, attempt: records.AttemptRef, spans: Sequence[Span]) -> int:
        packed = [pack_span(attempt, span) for span in spans]
        database = self._opened
        if not packed:  # no write checks that the attempt exists
            await self.attempt(attempt.attempt_id)
        # Feedback is a change of its rollout.
        tables = database.moving if any(item.feedback for item in packed) else database.adding
        return sum(await self._write(tables.add_spans, packed))

    async def add_calls(self, calls: Sequence[StoredCall]) -> list[bool]:
        return await self._write(self._opened.adding.add_calls, [pack_call(call) for call in calls])

    async def add_images(self, attempt: records.AttemptRef, images: Sequence[Image]) -> None:
        packed = [pack_image(attempt, image) for image in images]
        await self._write(self._opened.adding.add_images, packed)

    async def images(self, digests: Sequence[str]) -> dict[str, Image]:
        return await self._read(self._opened.reader.images, digests)

    async def mark_call(self, attempt_id: str, call_id: str, outcome: CallOutcome) -> None:
        await self._write(self._opened.adding.mark_calls, [(attempt_id, call_id, outcome)])

    async def spans(self, attempt_ids: Sequence[str]) -> dict[str, list[Span]]:
        return await self._read(self._opened.reader.spans, attempt_ids)

    async def token_records(self, attempt_ids: Sequence[str]) -> dict[str, list[TokenRecord]]:
        return await self._read(self._opened.reader.token_records, attempt_ids)
