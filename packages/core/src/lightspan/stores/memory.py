"""MemoryStore: a store in this process's memory, for tests, dry runs and notebooks.

It has the methods of the SQL stores (`_sql.store`), over dictionaries instead of tables.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, TypeAlias, TypeVar

from lightspan.errors import NotFoundError
from lightspan.schema import clock as machine
from lightspan.schema.records import (
    Attempt,
    Claim,
    Peer,
    Rollout,
    RolloutState,
    RolloutStatus,
    RolloutSummary,
)
from lightspan.schema.resources import NamedResources, decode_resources
from lightspan.schema.reward import Reward
from lightspan.schema.spans import Span
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores import _state_machine
from lightspan.stores._encoding import (
    PackedCall,
    PackedRecord,
    PackedRollout,
    PackedSpan,
    supersedes,
    unpack_peer,
    unpack_record,
    unpack_rollout,
    unpack_span,
)
from lightspan.stores._leases import attempt_of_token
from lightspan.stores._sql.connections import OpenDatabase
from lightspan.stores._sql.group_commit import Work
from lightspan.stores._sql.store import SQLStore
from lightspan.stores._state_machine import Progress, check_known, find_attempts
from lightspan.stores.protocol import (
    PEER_KEPT_S,
    Changes,
    PolicyVersion,
    StoreCapabilities,
    Summaries,
)

T = TypeVar("T")
R = TypeVar("R")

_Queues: TypeAlias = defaultdict[str, list[tuple[int, str]]]


class MemoryStore(SQLStore["_MemoryDatabase"]):
    """A store for one process, usable from any thread and any event loop.

    Its content is lost with the object. Rollouts and spans are kept as bytes, so each read returns
    a fresh copy, as other stores do.
    """

    capabilities = StoreCapabilities(durable=False, multi_process=False)
    url = "memory:"

    def __init__(self, *, clock: Callable[[], float] = machine.now) -> None:
        super().__init__(self.url, (60.0, 60.0))
        self._tables = _MemoryTables(clock)

    def _start(self) -> _MemoryDatabase:
        return _MemoryDatabase(self._tables, self._signal.notify)


class _MemoryDatabase(OpenDatabase):
    """The tables of a memory store, which only one thread reads or writes at a time."""

    def __init__(self, tables: _MemoryTables, on_move: Callable[[], None]) -> None:
        shared: Any = tables  # has the methods of a SQL store's tables, and no SQL
        super().__init__(shared, shared, shared)
        self._on_move = on_move
        self._tables = tables
        self._lock = threading.Lock()

    async def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> list[R]:
        with self._lock:
            before = self._tables.change
            answers = work(items)
            has_moved = self._tables.change != before
        if has_moved:
            self._on_move()
        return answers

    async def read(self, query: Callable[[], R]) -> R:
        return self._query(query)

    def _query(self, query: Callable[[], R]) -> R:
        with self._lock:
            return query()

    def stop(self) -> None:
        """Close nothing: a store that is opened again has the same content."""


@dataclass(slots=True)
class _RolloutRow:
    position: int
    rollout: Rollout
    """The rollout, for filters only. Callers get a copy from `body`, because they may change its
    task."""
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

    def summary(self, attempts: Mapping[str, _AttemptRow]) -> RolloutSummary:
        rollout, latest = self.rollout, attempts.get(self.progress.attempt_id or "")
        row = latest or _AttemptRow(_NO_ATTEMPT)
        return RolloutSummary(
            rollout_id=rollout.rollout_id,
            run_id=rollout.run_id,
            group_id=rollout.group_id,
            task_id=rollout.task_id,
            mode=rollout.mode,
            step=rollout.step,
            status=self.progress.status,
            created_at=self.progress.created_at,
            position=self.position,
            change=self.progress.change,
            attempt_id=self.progress.attempt_id,
            runner_id=row.attempt.runner_id,
            outcome=row.attempt.outcome,
            message=row.attempt.message,
            reward=row.attempt.reward,
            feedback=row.feedback.get(False, row.feedback.get(True)),
            started_at=None if latest is None else row.attempt.started_at,
            ended_at=row.attempt.ended_at,
            capture_errors=len(row.attempt.capture_errors),
        )


@dataclass(slots=True)
class _AttemptRow:
    attempt: Attempt
    spans: dict[str, tuple[PackedSpan, bool]] = field(default_factory=dict)
    """Span id → span, and whether it is late."""
    records: dict[tuple[str, int], tuple[PackedRecord, bool]] = field(default_factory=dict)
    """(Call id, choice) → record, and whether it is late."""
    outcomes: dict[str, CallOutcome] = field(default_factory=dict)
    """Call id → outcome, for calls whose outcome changed after they were written."""
    feedback: dict[bool, Reward] = field(default_factory=dict)
    """The last feedback on the attempt (key False), and the last on one of its calls (True)."""

    def is_late(self, epoch: int) -> bool:
        return self.attempt.sealed or self.attempt.epoch != epoch

    def has_records(self, call_id: str) -> bool:
        return any(call == call_id for call, _ in self.records)

    def has_call(self, call_id: str) -> bool:
        calls = (span.call_id for span, _ in self.spans.values())
        return bool(call_id) and (call_id in calls or self.has_records(call_id))

    def add_span(self, span: PackedSpan) -> bool:
        """Store a span unless its id is already stored; return whether the stored span is late.

        A span is late if it arrived after the end of its attempt, or from a runner that had lost
        the attempt.
        """
        return self.spans.setdefault(span.span_id, (span, span.late or self.is_late(span.epoch)))[1]

    def add_call(self, call: PackedCall) -> bool:
        """Store a call; return whether the stored call is late (see `add_span`).

        If the call is already stored, `_encoding.supersedes` decides whether it is replaced.
        """
        span, late = call.span, self.is_late(call.span.epoch)
        stored, stored_late = self.spans.get(span.span_id, (span, late))
        if stored.body != span.body:
            if supersedes(span, late, stored.body, stored_late):
                self.spans[span.span_id] = (span, late)
                self.outcomes.pop(span.call_id, None)
                for key in [key for key in self.records if key[0] == span.call_id]:
                    del self.records[key]
            elif self.has_records(span.call_id):
                return stored_late
        for record in call.records:
            key = (record.call_id, record.choice)
            self.records.setdefault(key, (record, late or record.late))
        return self.add_span(span)

    def has_text(self, texts: tuple[bytes, bytes]) -> bool:
        return any(text in span.body for span, _ in self.spans.values() for text in texts)

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


class _MemoryTables(_state_machine.Tables):
    """The dictionaries with the content of a memory store.

    Its methods are those of `WriteTables` and `ReadTables`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self.change = 0
        self._resources: dict[str, bytes] = {}
        self._policies: defaultdict[str, list[PolicyVersion]] = defaultdict(list)
        self._allotted: dict[tuple[str, str], int] = {}
        """(Policy, request id) → the version allotted for it."""
        self._peers: dict[str, tuple[float, bytes]] = {}
        self._rollouts: dict[str, _RolloutRow] = {}
        self._attempts: dict[str, _AttemptRow] = {}
        self._positions = itertools.count(1)
        self._changes: dict[int, str] = {}
        """Number of a rollout's latest status change → rollout id, in the order of the numbers."""
        self._queues: _Queues = defaultdict(list)
        """Run id → heap of (position, rollout id); entries that are no longer queued remain."""
        self._alone: _Queues = defaultdict(list)
        """Like `_queues`, for rollouts that must run alone."""
        self._leases: list[tuple[float, int, int, str]] = []
        """Heap of (lease end, position of the rollout, attempt number, attempt id). The old entry
        of an extended lease stays."""

    # --- resources, policies and peers ----------------------------------------------------
    def put_resources(self, items: Sequence[tuple[str, bytes]]) -> list[None]:
        self._resources.update(items)
        return [None] * len(items)

    def resources(self, resources_id: str) -> NamedResources:
        check_known("resources", [resources_id], self._resources)
        return decode_resources(self._resources[resources_id])

    def allot_versions(self, items: Sequence[tuple[str, str, int, str | None]]) -> list[int]:
        return [self._allot_version(*item) for item in items]

    def _allot_version(self, policy: str, run_id: str, step: int, request_id: str | None) -> int:
        versions = self._policies[policy]
        version = len(versions) + 1
        if request_id is not None:
            allotted = self._allotted.setdefault((policy, request_id), version)
            if allotted != version:
                return allotted
        versions.append(PolicyVersion(policy=policy, version=version, run_id=run_id, step=step))
        return version

    def policy_versions(self, policy: str) -> list[PolicyVersion]:
        return list(self._policies.get(policy, ()))

    def put_peers(self, items: Sequence[tuple[str, float, bytes]]) -> list[None]:
        for peer_id, seen_at, body in items:
            self._peers = {**self._recent_peers(seen_at), peer_id: (seen_at, body)}
        return [None] * len(items)

    def drop_peers(self, peer_ids: Sequence[str]) -> list[None]:
        for peer_id in peer_ids:
            self._peers.pop(peer_id, None)
        return [None] * len(peer_ids)

    def peers(self) -> list[Peer]:
        now = self.now()
        recent = sorted(self._recent_peers(now).items())
        return [unpack_peer(body, now - seen_at) for _, (seen_at, body) in recent]

    def _recent_peers(self, now: float) -> dict[str, tuple[float, bytes]]:
        return {name: row for name, row in self._peers.items() if row[0] >= now - PEER_KEPT_S}

    # --- rollouts -------------------------------------------------------------------------
    def rollouts(
        self, rollout_ids: Sequence[str] | None, limit: int | None, filters: dict[str, Any]
    ) -> list[RolloutState]:
        matching = (row for row in self._rows(rollout_ids) if _matches(row, **filters))
        return [row.state() for row in islice(matching, limit)]

    def _rows(self, rollout_ids: Sequence[str] | None) -> Iterable[_RolloutRow]:
        """Return the rows of `rollout_ids`, or all rows if None, in the order of enqueueing."""
        if rollout_ids is None:
            return self._rollouts.values()
        self.check_rollouts(rollout_ids)
        rows = (self._rollouts[rollout_id] for rollout_id in dict.fromkeys(rollout_ids))
        return sorted(rows, key=lambda row: row.position)

    def check_rollouts(self, rollout_ids: Sequence[str]) -> None:
        check_known("rollout", rollout_ids, self._rollouts)

    def changes(self, cursor: int, run_id: str | None) -> Changes:
        newest_first = takewhile(lambda change: change > cursor, reversed(self._changes))
        rows = [self._rollouts[self._changes[change]] for change in newest_first][::-1]
        states = [row.state() for row in rows if run_id in (None, row.rollout.run_id)]
        return Changes(cursor=max(cursor, self.change), rollouts=states)

    def summaries(self, filters: dict[str, Any], limit: int, *, newest: bool) -> Summaries:
        cursor, before = filters["cursor"] or 0, filters["before"]
        after = list(takewhile(lambda change: change > cursor, reversed(self._changes)))
        ids = reversed(self._rollouts) if newest else (self._changes[n] for n in after[::-1])
        matching = (
            row.summary(self._attempts)
            for row in map(self._rollouts.__getitem__, ids)
            if row.progress.change > cursor
            and (before is None or row.position < before)
            and _matches(row, filters["watched_run"], filters["mode"])
        )
        rows = list(islice(matching, limit))
        last = rows[-1].change if len(rows) == limit and not newest else self.change
        return Summaries(cursor=max(cursor, last), rows=rows)

    def place_of(self, attempt_id: str) -> int:
        check_known("attempt", [attempt_id], self._attempts)
        attempt = self._attempts[attempt_id].attempt
        return (self._rollouts[attempt.rollout_id].position << 20) + attempt.number

    def search(
        self, texts: tuple[bytes, bytes], run_id: str | None, before: int, size: int
    ) -> tuple[list[str], int]:
        ids = (
            attempt_id
            for row in reversed(self._rollouts.values())
            if run_id in (None, row.rollout.run_id)
            for attempt_id in reversed(row.attempt_ids)
            if self.place_of(attempt_id) < before and self._attempts[attempt_id].has_text(texts)
        )
        return list(ids), 0

    def queued_runs(self) -> set[str]:
        queues = (*self._queues.items(), *self._alone.items())
        return {run_id for run_id, queue in queues if self._without_old(queue)}

    def count(self, run_id: str | None) -> dict[RolloutStatus, int]:
        rows = (row for row in self._rollouts.values() if run_id in (None, row.rollout.run_id))
        return dict(Counter(row.progress.status for row in rows))

    def prune(self, before: float, limit: int) -> int:
        """Delete at most `limit` rollouts that ended before the time `before`; return how many."""
        # The latest rollout and the latest change stay: the next numbers continue from theirs.
        newest = {next(reversed(ids), None) for ids in (self._rollouts, self._changes.values())}
        ended = (
            row
            for rollout_id, row in self._rollouts.items()
            if rollout_id not in newest
            and row.progress.finished_at is not None
            and row.progress.finished_at < before
        )
        pruned = list(islice(ended, limit))
        for row in pruned:
            del self._rollouts[row.rollout.rollout_id]
            del self._changes[row.progress.change]
            for attempt_id in row.attempt_ids:
                del self._attempts[attempt_id]
        return len(pruned)

    # --- attempts, spans and calls --------------------------------------------------------
    def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        return [
            self._attempts[attempt_id].attempt
            for rollout_id in rollout_ids
            if rollout_id in self._rollouts
            for attempt_id in self._rollouts[rollout_id].attempt_ids
        ]

    def attempt(self, attempt_id: str) -> Attempt:
        return find_attempts(self, [attempt_id])[attempt_id]

    def claim_of_token(self, call_token: str) -> Claim | None:
        row = self._attempts.get(attempt_of_token(call_token))
        # A comparison that stops at the first difference would leak the token by its time.
        if row is None or not secrets.compare_digest(row.attempt.call_token, call_token):
            return None
        body = self._rollouts[row.attempt.rollout_id].body
        return Claim(rollout=unpack_rollout(body), attempt=row.attempt)

    def add_spans(self, items: Sequence[PackedSpan]) -> list[bool]:
        check_known("attempt", [item.attempt_id for item in items], self._attempts)
        for item in items:
            row = self._attempts[item.attempt_id]
            if item.feedback and item.span_id not in row.spans:
                row.feedback[item.feedback.is_of_call] = item.feedback.reward
                _state_machine.touch(self, [item.attempt_id])
        return [self._attempts[item.attempt_id].add_span(item) for item in items]

    def add_calls(self, items: Sequence[PackedCall]) -> list[bool]:
        check_known("attempt", [item.span.attempt_id for item in items], self._attempts)
        return [self._attempts[item.span.attempt_id].add_call(item) for item in items]

    def mark_calls(self, items: Sequence[tuple[str, str, CallOutcome]]) -> list[None]:
        for attempt_id, call_id, outcome in items:
            row = self._attempts.get(attempt_id)
            if row is None or not row.has_call(call_id):
                raise NotFoundError(f"this store has no call {call_id!r} of attempt {attempt_id!r}")
            row.outcomes[call_id] = outcome
        return [None] * len(items)

    def spans(self, attempt_ids: Sequence[str]) -> dict[str, list[Span]]:
        return {name: self._attempt_row(name).read_spans() for name in attempt_ids}

    def token_records(self, attempt_ids: Sequence[str]) -> dict[str, list[TokenRecord]]:
        return {name: self._attempt_row(name).read_records() for name in attempt_ids}

    def _attempt_row(self, attempt_id: str) -> _AttemptRow:
        """Return the row of an attempt; an empty row if the attempt is unknown."""
        return self._attempts.get(attempt_id) or _AttemptRow(_NO_ATTEMPT)

    # --- _state_machine.Tables ------------------------------------------------------------
    def next_change(self) -> int:
        self.change += 1
        return self.change

    def bodies(self, rollout_ids: Sequence[str]) -> dict[str, bytes]:
        return {name: self._rollouts[name].body for name in rollout_ids if name in self._rollouts}

    def insert_rollouts(self, rows: Sequence[tuple[PackedRollout, Progress]]) -> None:
        for (rollout, body), progress in rows:
            row = _RolloutRow(next(self._positions), rollout, body, progress)
            self._rollouts[rollout.rollout_id] = row
            self._record_move(row)

    def progress(self, rollout_ids: Sequence[str]) -> dict[str, Progress]:
        rollouts = self._rollouts
        return {name: rollouts[name].progress for name in rollout_ids if name in rollouts}

    def update_rollouts(self, rows: Sequence[Progress]) -> None:
        for progress in rows:
            row = self._rollouts[progress.rollout_id]
            self._changes.pop(row.progress.change, None)
            row.progress = progress
            self._record_move(row)

    def _record_move(self, row: _RolloutRow) -> None:
        self._changes[row.progress.change] = row.progress.rollout_id
        if row.progress.status is RolloutStatus.QUEUED:
            queues = self._alone if row.progress.alone else self._queues
            heapq.heappush(queues[row.rollout.run_id], (row.position, row.progress.rollout_id))

    def dequeue(
        self, limit: int, run_id: str | None, *, is_idle: bool
    ) -> list[tuple[Progress, Rollout]]:
        alone = self._pop(self._alone, min(limit, 1), run_id) if is_idle else []
        return alone or self._pop(self._queues, limit, run_id)

    def _pop(
        self, queues: _Queues, limit: int, run_id: str | None
    ) -> list[tuple[Progress, Rollout]]:
        dequeued: list[tuple[Progress, Rollout]] = []
        while len(dequeued) < limit and (queue := self._oldest_queue(queues, run_id)):
            row = self._rollouts[heapq.heappop(queue)[1]]
            dequeued.append((row.progress, unpack_rollout(row.body)))
        return dequeued

    def _oldest_queue(self, queues: _Queues, run_id: str | None) -> list[tuple[int, str]]:
        """Return the queue of the run `run_id`; for None, the queue with the oldest queued rollout.

        The result is empty if no rollout is queued.
        """
        if run_id is not None:
            return self._without_old(queues.get(run_id, []))
        return min((queue for queue in queues.values() if self._without_old(queue)), default=[])

    def _without_old(self, queue: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """Remove the first entries of `queue` whose rollouts are not queued; return `queue`."""
        while queue:
            row = self._rollouts.get(queue[0][1])
            if row is not None and row.progress.status is RolloutStatus.QUEUED:
                break
            heapq.heappop(queue)
        return queue

    def attempts_by_id(self, attempt_ids: Sequence[str]) -> dict[str, Attempt]:
        attempts = self._attempts
        return {name: attempts[name].attempt for name in attempt_ids if name in attempts}

    def insert_attempts(self, rows: Sequence[Attempt]) -> None:
        for attempt in rows:
            self._attempts[attempt.attempt_id] = _AttemptRow(attempt)
            self._rollouts[attempt.rollout_id].attempt_ids.append(attempt.attempt_id)
            self._record_lease(attempt)

    def update_attempts(self, rows: Sequence[Attempt]) -> None:
        for attempt in rows:
            self._attempts[attempt.attempt_id].attempt = attempt
            self._record_lease(attempt)

    def _record_lease(self, attempt: Attempt) -> None:
        if not attempt.sealed:
            place = (self._rollouts[attempt.rollout_id].position, attempt.number)
            heapq.heappush(self._leases, (attempt.lease_until, *place, attempt.attempt_id))

    def expired(self, now: float, limit: int) -> list[Attempt]:
        expired: dict[str, Attempt] = {}
        while self._leases and self._leases[0][0] <= now and len(expired) < limit:
            row = self._attempts.get(heapq.heappop(self._leases)[-1])
            # A lease may have been extended, or its attempt has ended or was deleted.
            if row is not None and not row.attempt.sealed and row.attempt.lease_until <= now:
                expired[row.attempt.attempt_id] = row.attempt
        return list(expired.values())


_NO_ATTEMPT = Attempt(attempt_id="", rollout_id="", number=0, epoch=0)


def _matches(
    row: _RolloutRow,
    run_id: str | None,
    mode: str | None,
    step: int | None = None,
    status: Collection[RolloutStatus] | None = None,
) -> bool:
    rollout = row.rollout
    wanted = ((run_id, rollout.run_id), (mode, rollout.mode), (step, rollout.step))
    is_equal = all(expected in (None, value) for expected, value in wanted)
    return is_equal and (status is None or row.progress.status in status)
