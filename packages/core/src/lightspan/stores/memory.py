"""MemoryStore: everything in this process's memory, for tests, dry runs and notebooks."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TypeAlias

from lightspan.errors import NotFoundError, StoreClosedError
from lightspan.schema import clock
from lightspan.schema.records import (
    Attempt,
    AttemptRef,
    Claim,
    Mode,
    Peer,
    Report,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.schema.resources import (
    NamedResources,
    decode_resources,
    encode_resources,
    resources_id,
)
from lightspan.schema.spans import Span
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores import _leases, _state_machine
from lightspan.stores._encoding import (
    PackedCall,
    PackedRecord,
    PackedRollout,
    PackedSpan,
    pack_call,
    pack_peer,
    pack_rollout,
    pack_span,
    supersedes,
    unpack_peer,
    unpack_record,
    unpack_rollout,
    unpack_span,
)
from lightspan.stores._idempotency import check_id
from lightspan.stores._signal import Signal
from lightspan.stores._state_machine import Begun, Progress
from lightspan.stores._validation import (
    check_integer,
    check_lease,
    check_pruning,
    check_rewards,
    check_timeout,
)
from lightspan.stores.protocol import (
    PEER_KEPT_S,
    PRUNED_AT_ONCE,
    Changes,
    PolicyVersion,
    Store,
    StoreCapabilities,
    StoredCall,
)


class MemoryStore(Store):
    """A store for one process (any thread, any event loop). What it holds ends with the process.

    Spans and rollouts rest as bytes: they come back as fresh copies, as from any other store, and
    the garbage collector does not walk them.
    """

    capabilities = StoreCapabilities(durable=False, multi_process=False)
    url = "memory:"

    def __init__(self, *, clock: Callable[[], float] = clock.now) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._signal = Signal()
        self._open = False
        self._tables = _MemoryTables()

    async def open(self) -> None:
        self._open = True

    async def close(self) -> None:
        self._open = False
        self._signal.notify()

    @contextmanager
    def _opened(self) -> Iterator[_MemoryTables]:
        if not self._open:
            raise StoreClosedError
        with self._lock:
            before = self._tables.change
            yield self._tables
            moved = self._tables.change != before
        if moved:
            self._signal.notify()

    # --- resources and policies -----------------------------------------------------------
    async def put_resources(self, resources: NamedResources) -> str:
        body, name = encode_resources(resources), resources_id(resources)
        with self._opened() as tables:
            tables.resources[name] = body
        return name

    async def get_resources(self, resources_id: str) -> NamedResources:
        with self._opened() as tables:
            _state_machine.check_known("resources", [resources_id], tables.resources)
            return decode_resources(tables.resources[resources_id])

    async def allot_version(
        self, policy: str, run_id: str = "", step: int = 0, *, request_id: str | None = None
    ) -> int:
        check_integer("step", step)
        if request_id is not None:
            check_id(request_id)
        with self._opened() as tables:
            versions = tables.policies[policy]
            version = len(versions) + 1
            if request_id is not None:
                known = tables.allotted.setdefault((policy, request_id), version)
                if known != version:
                    return known
            versions.append(PolicyVersion(policy=policy, version=version, run_id=run_id, step=step))
            return version

    async def policy_versions(self, policy: str) -> list[PolicyVersion]:
        with self._opened() as tables:
            return list(tables.policies.get(policy, ()))

    # --- rollouts -------------------------------------------------------------------------
    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        packed = [pack_rollout(rollout) for rollout in rollouts]
        with self._opened() as tables:
            _state_machine.enqueue(tables, packed, self._clock())

    async def start(self, claims: Sequence[Claim]) -> None:
        begun = [Begun(pack_rollout(claim.rollout), claim.attempt) for claim in claims]
        with self._opened() as tables:
            _state_machine.start(tables, begun, self._clock())

    async def claim(
        self,
        runner_id: str,
        slots: int,
        lease_s: float,
        run_id: str | None = None,
        idle: bool = True,
        *,
        request_id: str | None = None,
    ) -> list[Claim]:
        request = _leases.claim_request(runner_id, slots, lease_s, run_id, idle, request_id)
        with self._opened() as tables:
            now = self._clock()
            _leases.expire(tables, len(tables.attempts), now)
            return _leases.claim(tables, request, now).claims

    async def heartbeat(self, attempts: Sequence[AttemptRef], lease_s: float) -> list[AttemptRef]:
        check_lease(lease_s)
        with self._opened() as tables:
            items = [(ref, lease_s) for ref in attempts]
            mine = _leases.heartbeat(tables, items, self._clock())
        return [ref for ref, is_mine in zip(attempts, mine, strict=True) if not is_mine]

    async def report(self, reports: Sequence[Report]) -> list[bool]:
        check_rewards(reports)
        with self._opened() as tables:
            return _state_machine.report(tables, reports, self._clock())

    async def lease_time(self) -> float:
        with self._opened():
            return self._clock()

    async def expire(self) -> int:
        with self._opened() as tables:
            return _leases.expire(tables, len(tables.attempts), self._clock())

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        with self._opened() as tables:
            return sum(_state_machine.cancel(tables, rollout_ids, self._clock()))

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
        for name, value in (("step", step), ("limit", limit)):
            if value is not None:
                check_integer(name, value)
        with self._opened() as tables:
            matching = (
                row
                for row in tables.rows(rollout_ids)
                if run_id in (None, row.rollout.run_id)
                and mode in (None, row.rollout.mode)
                and step in (None, row.rollout.step)
                and (status is None or row.progress.status in status)
            )
            return [row.state() for row in islice(matching, limit)]

    async def watch(
        self, cursor: int = 0, *, run_id: str | None = None, timeout_s: float = 0.0
    ) -> Changes:
        check_integer("cursor", cursor)
        check_timeout(timeout_s)
        deadline = clock.monotonic() + timeout_s
        with self._signal.waiter() as waiter:
            while True:
                changes = self._changes(cursor, run_id)
                left = deadline - clock.monotonic()
                if changes.rollouts or left <= 0:
                    return changes
                await waiter.wait(left)

    async def await_work(
        self, run_ids: Sequence[str] | None = None, *, timeout_s: float = 0.0
    ) -> bool:
        check_timeout(timeout_s)
        deadline = clock.monotonic() + timeout_s
        with self._signal.waiter() as waiter:
            while True:
                with self._opened() as tables:
                    queued = tables.queued_runs()
                if queued if run_ids is None else queued.intersection(run_ids):
                    return True
                left = deadline - clock.monotonic()
                if left <= 0:
                    return False
                await waiter.wait(left)

    def _changes(self, cursor: int, run_id: str | None) -> Changes:
        with self._opened() as tables:
            rows = tables.changed_since(cursor)
            return Changes(
                cursor=max(cursor, tables.change),
                rollouts=[row.state() for row in rows if run_id in (None, row.rollout.run_id)],
            )

    async def count(self, run_id: str | None = None) -> dict[RolloutStatus, int]:
        with self._opened() as tables:
            rows = tables.rollouts.values()
            return dict(
                Counter(row.progress.status for row in rows if run_id in (None, row.rollout.run_id))
            )

    async def prune(self, older_than_s: float, limit: int = PRUNED_AT_ONCE) -> int:
        check_pruning(older_than_s, limit)
        with self._opened() as tables:
            return tables.prune(self._clock() - older_than_s, limit)

    # --- who works with it ----------------------------------------------------------------
    async def announce(self, peer: Peer) -> None:
        with self._opened() as tables:
            now = self._clock()
            tables.peers = {**tables.recent_peers(now), peer.peer_id: (now, pack_peer(peer))}

    async def withdraw(self, peer_id: str) -> None:
        with self._opened() as tables:
            tables.peers.pop(peer_id, None)

    async def peers(self) -> list[Peer]:
        now = self._clock()
        with self._opened() as tables:
            recent = sorted(tables.recent_peers(now).items())
        return [unpack_peer(body, now - seen_at) for _, (seen_at, body) in recent]

    # --- attempts and what they did -------------------------------------------------------
    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        with self._opened() as tables:
            return [
                tables.attempts[attempt_id].attempt
                for rollout_id in rollout_ids
                if rollout_id in tables.rollouts
                for attempt_id in tables.rollouts[rollout_id].attempt_ids
            ]

    async def attempt(self, attempt_id: str) -> Attempt:
        with self._opened() as tables:
            return _state_machine.find_attempts(tables, [attempt_id])[attempt_id]

    async def claim_of_token(self, call_token: str) -> Claim | None:
        with self._opened() as tables:
            row = tables.attempts.get(_leases.attempt_of_token(call_token))
            if row is None or row.attempt.call_token != call_token:
                return None
            attempt = row.attempt
            body = tables.rollouts[attempt.rollout_id].body
            return Claim(rollout=unpack_rollout(body), attempt=attempt)

    async def mark_damaged(self, attempt_id: str, reason: str) -> None:
        with self._opened() as tables:
            _state_machine.mark_damaged(tables, [(attempt_id, reason)])

    async def add_spans(self, attempt: AttemptRef, spans: Sequence[Span]) -> int:
        packed = [pack_span(attempt, span) for span in spans]
        with self._opened() as tables:
            _state_machine.find_attempts(tables, [attempt.attempt_id])
            return sum(tables.add_span(span) for span in packed)

    async def add_calls(self, calls: Sequence[StoredCall]) -> list[bool]:
        packed = [pack_call(call) for call in calls]
        with self._opened() as tables:
            _state_machine.find_attempts(tables, [call.span.attempt_id for call in packed])
            return [tables.add_call(call) for call in packed]

    async def mark_call(self, attempt_id: str, call_id: str, outcome: CallOutcome) -> None:
        with self._opened() as tables:
            row = tables.attempts.get(attempt_id)
            if row is None or not row.has_call(call_id):
                raise NotFoundError(f"this store knows no call {call_id!r} of {attempt_id!r}")
            row.outcomes[call_id] = outcome

    async def spans(self, attempt_ids: Sequence[str]) -> dict[str, list[Span]]:
        with self._opened() as tables:
            return {each: tables.attempt_row(each).read_spans() for each in attempt_ids}

    async def token_records(self, attempt_ids: Sequence[str]) -> dict[str, list[TokenRecord]]:
        with self._opened() as tables:
            return {each: tables.attempt_row(each).read_records() for each in attempt_ids}


@dataclass(slots=True)
class _RolloutRow:
    position: int
    rollout: Rollout
    """To filter by; never handed out, because its task could be changed."""
    body: bytes
    progress: Progress
    attempt_ids: list[str] = field(default_factory=list)

    def state(self) -> RolloutState:
        return RolloutState(
            rollout=unpack_rollout(self.body),
            status=self.progress.status,
            infrastructure_tries=self.progress.infrastructure_tries,
            attempt_id=self.progress.attempt_id,
            created_at=self.progress.created_at,
            finished_at=self.progress.finished_at,
            change=self.progress.change,
        )


@dataclass(slots=True)
class _AttemptRow:
    position: int
    attempt: Attempt
    spans: dict[str, tuple[PackedSpan, bool]] = field(default_factory=dict)
    records: dict[tuple[str, int], tuple[PackedRecord, bool]] = field(default_factory=dict)
    outcomes: dict[str, CallOutcome] = field(default_factory=dict)

    def has_call(self, call_id: str) -> bool:
        calls = {span.call_id for span, _ in self.spans.values()}
        return bool(call_id) and (call_id in calls or self.has_records(call_id))

    def has_records(self, call_id: str) -> bool:
        return any(call == call_id for call, _ in self.records)

    def replace_call(self, span: PackedSpan, late: bool) -> None:
        """Put a later try of a call in the place of an earlier one."""
        self.spans[span.span_id] = (span, late)
        self.outcomes.pop(span.call_id, None)
        for key in [key for key in self.records if key[0] == span.call_id]:
            del self.records[key]

    def read_spans(self) -> list[Span]:
        return [
            unpack_span(span.body, late, self.outcomes.get(span.call_id))
            for span, late in self.spans.values()
        ]

    def read_records(self) -> list[TokenRecord]:
        rows = sorted(
            self.records.values(),
            key=lambda row: (row[0].sequence_start, row[0].call_id, row[0].choice),
        )
        return [
            unpack_record(
                record.head,
                (record.prompt, record.response, record.logprobs),
                late,
                self.outcomes.get(record.call_id),
            )
            for record, late in rows
        ]


_Queues: TypeAlias = defaultdict[str, list[tuple[int, str]]]


class _MemoryTables(_state_machine.Tables):
    """The dictionaries behind a MemoryStore; `_state_machine.Tables`."""

    def __init__(self) -> None:
        self.change = 0
        self.resources: dict[str, bytes] = {}
        self.policies: defaultdict[str, list[PolicyVersion]] = defaultdict(list)
        self.allotted: dict[tuple[str, str], int] = {}
        """(Policy, id of a request) → the version that it was given."""
        self.peers: dict[str, tuple[float, bytes]] = {}
        self.rollouts: dict[str, _RolloutRow] = {}
        self.attempts: dict[str, _AttemptRow] = {}
        self._places = itertools.count()
        """Of rollouts and attempts: those that were forgotten take none from the next."""
        self._changes: dict[int, str] = {}
        """Number of a change → its rollout, the latest change of each only. A dictionary keeps the
        order of insertion, so the newest are at its end."""
        self._queues: _Queues = defaultdict(list)
        """Per run, a heap of (position, rollout id); entries that are not queued any more stay."""
        self._alone: _Queues = defaultdict(list)
        """Likewise, of those that are to be run alone."""
        self._leases: list[tuple[float, int, int, str]] = []
        """A heap of (lease end, position, attempt id); renewed leases leave old entries."""

    def recent_peers(self, now: float) -> dict[str, tuple[float, bytes]]:
        """Peers that were heard of in the last day."""
        return {i: seen for i, seen in self.peers.items() if seen[0] >= now - PEER_KEPT_S}

    def rows(self, rollout_ids: Sequence[str] | None) -> Iterable[_RolloutRow]:
        """In the order in which they were enqueued."""
        if rollout_ids is None:
            return self.rollouts.values()
        _state_machine.check_known("rollout", rollout_ids, self.rollouts)
        rows = (self.rollouts[rollout_id] for rollout_id in dict.fromkeys(rollout_ids))
        return sorted(rows, key=lambda row: row.position)

    def attempt_row(self, attempt_id: str) -> _AttemptRow:
        """The row, or an empty one that is not kept."""
        return self.attempts.get(attempt_id) or _AttemptRow(-1, _NOBODY)

    def changed_since(self, cursor: int) -> list[_RolloutRow]:
        newest_first = takewhile(lambda change: change > cursor, reversed(self._changes))
        return [self.rollouts[self._changes[change]] for change in newest_first][::-1]

    def add_span(self, span: PackedSpan) -> bool:
        """Keep the span unless it is there; True if what is kept is late."""
        row = self.attempts[span.attempt_id]
        late = span.late or _leases.is_late(row.attempt, span.epoch)
        return row.spans.setdefault(span.span_id, (span, late))[1]

    def add_call(self, call: PackedCall) -> bool:
        """Keep the call unless it is there, finished; True if what is kept is late."""
        row = self.attempts[call.span.attempt_id]
        late = _leases.is_late(row.attempt, call.span.epoch)
        kept, kept_late = row.spans.get(call.span.span_id, (call.span, late))
        if kept.body != call.span.body:
            if supersedes(call.span, late, kept.body, kept_late):
                row.replace_call(call.span, late)
            elif row.has_records(call.span.call_id):
                return kept_late
        for record in call.records:
            key = (record.call_id, record.choice)
            row.records.setdefault(key, (record, late or record.late))
        return self.add_span(call.span)

    def prune(self, before: float, limit: int) -> int:
        """Forget at most so many rollouts that ended before that time; how many there were."""
        kept = {next(reversed(rows), None) for rows in (self.rollouts, self._changes.values())}
        ended = (
            row
            for rollout_id, row in self.rollouts.items()
            if rollout_id not in kept
            and row.progress.finished_at is not None
            and row.progress.finished_at < before
        )
        pruned = list(islice(ended, limit))
        for row in pruned:
            del self.rollouts[row.rollout.rollout_id]
            del self._changes[row.progress.change]
            for attempt_id in row.attempt_ids:
                del self.attempts[attempt_id]
        return len(pruned)

    # --- _state_machine.Tables ------------------------------------------------------------
    def next_change(self) -> int:
        self.change += 1
        return self.change

    def bodies(self, rollout_ids: Sequence[str]) -> dict[str, bytes]:
        return {i: self.rollouts[i].body for i in rollout_ids if i in self.rollouts}

    def insert_rollouts(self, rows: Sequence[tuple[PackedRollout, Progress]]) -> None:
        for (rollout, body), progress in rows:
            row = _RolloutRow(next(self._places), rollout, body, progress)
            self.rollouts[rollout.rollout_id] = row
            self._moved(row)

    def progress(self, rollout_ids: Sequence[str]) -> dict[str, Progress]:
        return {i: self.rollouts[i].progress for i in rollout_ids if i in self.rollouts}

    def update_rollouts(self, rows: Sequence[Progress]) -> None:
        for progress in rows:
            row = self.rollouts[progress.rollout_id]
            self._changes.pop(row.progress.change, None)
            row.progress = progress
            self._moved(row)

    def _moved(self, row: _RolloutRow) -> None:
        self._changes[row.progress.change] = row.progress.rollout_id
        if row.progress.status is RolloutStatus.QUEUED:
            entry = (row.position, row.progress.rollout_id)
            queues = self._alone if row.progress.alone else self._queues
            heapq.heappush(queues[row.rollout.run_id], entry)

    def take_queued(
        self, limit: int, run_id: str | None, alone: bool = False
    ) -> list[tuple[Progress, Rollout]]:
        taken: list[tuple[Progress, Rollout]] = []
        queues = self._alone if alone else self._queues
        while len(taken) < limit and (queue := self._oldest_queue(queues, run_id)):
            row = self.rollouts[heapq.heappop(queue)[1]]
            taken.append((row.progress, unpack_rollout(row.body)))
        return taken

    def queued_runs(self) -> set[str]:
        """Those that have something to claim."""
        queues = (*self._queues.items(), *self._alone.items())
        return {run_id for run_id, queue in queues if self._pruned(queue)}

    def _oldest_queue(self, queues: _Queues, run_id: str | None) -> list[tuple[int, str]]:
        """The run's queue, or the one whose head is the oldest; empty if none has one."""
        if run_id is not None:
            return self._pruned(queues.get(run_id, []))
        heads = [queue for queue in queues.values() if self._pruned(queue)]
        return min(heads, default=[])

    def _pruned(self, queue: list[tuple[int, str]]) -> list[tuple[int, str]]:
        while queue and self._status(queue[0][1]) is not RolloutStatus.QUEUED:
            heapq.heappop(queue)
        return queue

    def _status(self, rollout_id: str) -> RolloutStatus | None:
        """None for a rollout that was forgotten."""
        row = self.rollouts.get(rollout_id)
        return None if row is None else row.progress.status

    def attempts_by_id(self, attempt_ids: Sequence[str]) -> dict[str, Attempt]:
        return {i: self.attempts[i].attempt for i in attempt_ids if i in self.attempts}

    def insert_attempts(self, rows: Sequence[Attempt]) -> None:
        for attempt in rows:
            self.attempts[attempt.attempt_id] = _AttemptRow(next(self._places), attempt)
            self.rollouts[attempt.rollout_id].attempt_ids.append(attempt.attempt_id)
            self._lease(attempt)

    def update_attempts(self, rows: Sequence[Attempt]) -> None:
        for attempt in rows:
            self.attempts[attempt.attempt_id].attempt = attempt
            if not attempt.sealed:
                self._lease(attempt)

    def _lease(self, attempt: Attempt) -> None:
        # those that run out at the same moment in the order of their rollouts, as in SQL's tables
        place = (self.rollouts[attempt.rollout_id].position, attempt.number)
        heapq.heappush(self._leases, (attempt.lease_until, *place, attempt.attempt_id))

    def expired(self, now: float, limit: int) -> list[Attempt]:
        expired: dict[str, Attempt] = {}
        while self._leases and self._leases[0][0] <= now and len(expired) < limit:
            row = self.attempts.get(heapq.heappop(self._leases)[-1])
            if row is None:  # forgotten
                continue
            attempt = row.attempt
            if not attempt.sealed and attempt.lease_until <= now:
                expired[attempt.attempt_id] = attempt
        return list(expired.values())


_NOBODY = Attempt(attempt_id="", rollout_id="", number=0, epoch=0)
