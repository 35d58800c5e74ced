"""The tables of a SQLite store: the writer's, for the state machine, and the reader's queries."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.errors import NotFoundError
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Claim,
    Outcome,
    Peer,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.schema.resources import NamedResources, decode_resources
from lightspan.schema.reward import Reward
from lightspan.schema.spans import Span
from lightspan.schema.tokens import CallOutcome, TokenRecord
from lightspan.stores._encoding import (
    PackedCall,
    PackedRollout,
    PackedSpan,
    supersedes,
    unpack_peer,
    unpack_record,
    unpack_rollout,
    unpack_span,
)
from lightspan.stores._leases import attempt_of_token
from lightspan.stores._state_machine import Progress, Tables, check_known, find_attempts
from lightspan.stores.protocol import PEER_KEPT_S, Changes, PolicyVersion
from lightspan.stores.sqlite.file import queries

_ROWS_PER_STATEMENT: Final = 64
_ANY_OF: Final = "IN (SELECT value FROM json_each(?))"

_msgpack = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()
_reward_decoder = msgspec.msgpack.Decoder(Reward)
_damage_decoder = msgspec.msgpack.Decoder(list[str])

_AFTER_RUNNING: Final = frozenset(
    {RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.LOST}
)
"""What a rollout becomes only from running: the queue stays as it is."""

_QUEUED, _ALONE = 1, 2
"""What `rollouts.queued` is of a rollout that is queued, and of one that is to be run alone."""

_FILTERS: Final = {
    "rollout_ids": "rollout_id IN (SELECT value FROM json_each(:rollout_ids))",
    # sorted as a list of positions, not as rows with their tasks
    "run_id": "position IN (SELECT position FROM rollouts WHERE run_id = :run_id)",
    "mode": "mode = :mode",
    "step": "step = :step",
    "status": "status IN (SELECT value FROM json_each(:status))",
    "cursor": "change > :cursor",
    "watched_run": "+run_id = :watched_run",  # the plus: search by the cursor, not by the run
}


class _Writing(NamedTuple):
    """What decides whether a write to an attempt is late."""

    position: int
    epoch: int
    sealed: bool

    def late(self, epoch: int) -> bool:
        return self.sealed or self.epoch != epoch


@dataclass(slots=True)
class _Ends:
    """What a transaction goes on from."""

    change: int
    """The last one."""
    position: int
    """Of the last rollout."""
    lease: float | None
    """The earliest that a lease ends, or ended."""


class _Connection:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._queries = queries()
        self._queries_of_one = {
            name: query.replace(_ANY_OF, "= ?") for name, query in self._queries.items()
        }

    def _ask(self, name: str, *values: Any) -> list[Any]:
        return self._db.execute(self._queries[name], values).fetchall()

    def _ask_of(self, name: str, ids: Sequence[str]) -> list[Any]:
        """A query that takes nothing but ids: for one, without the list's cost."""
        if len(ids) == 1:
            return self._db.execute(self._queries_of_one[name], ids).fetchall()
        return self._ask(name, _ids(ids))

    def bodies(self, rollout_ids: Sequence[str]) -> dict[str, bytes]:
        return dict(self._ask_of("bodies", rollout_ids))

    def attempts_by_id(self, attempt_ids: Sequence[str]) -> dict[str, Attempt]:
        return {row[0]: _attempt(row) for row in self._ask_of("attempts_by_id", attempt_ids)}


class WriteTables(_Connection, Tables):
    """The writer's view, inside a transaction that somebody else begins and commits."""

    def __init__(self, db: sqlite3.Connection) -> None:
        super().__init__(db)
        self._ends: _Ends | None = None
        self._moved = False

    def begin(self) -> None:
        """A new transaction: forget what the last one knew."""
        self._ends = None
        self._moved = False

    @property
    def moved(self) -> bool:
        """True if this transaction changed the status of a rollout."""
        return self._moved

    def put_resources(self, items: Sequence[tuple[str, bytes]]) -> list[None]:
        self._insert("put_resources", items)
        return [None] * len(items)

    def allot_versions(self, items: Sequence[tuple[str, str, int]]) -> list[int]:
        """Per (policy, run id, step) the policy's next version."""
        return [self._allot_version(*item) for item in items]

    def _allot_version(self, policy: str, run_id: str, step: int) -> int:
        version = int(self._ask("last_version", policy)[0][0]) + 1
        self._insert("insert_version", [(policy, version, run_id, step)])
        return version

    def add_spans(self, items: Sequence[PackedSpan]) -> list[bool]:
        """Keep the spans that are not there; per span, True if what is kept is late."""
        attempts = self._writings([item.attempt_id for item in items])
        rows = [_span_row(attempts[item.attempt_id], item) for item in items]
        if self._insert("insert_spans", rows) == len(rows):
            return [bool(late) for _, _, _, late, _ in rows]
        return [bool(self._ask("span_is_late", row[0], row[1])[0][0]) for row in rows]

    def add_calls(self, items: Sequence[PackedCall]) -> list[bool]:
        """Keep the calls that are not there, finished; per call, True if what is kept is late."""
        attempts = self._writings([item.span.attempt_id for item in items])
        spans = [_span_row(attempts[item.span.attempt_id], item.span) for item in items]
        if self._insert("insert_spans", spans) < len(spans):
            return [self._add_known_call(attempts[item.span.attempt_id], item) for item in items]
        rows = [row for item in items for row in _record_rows(attempts[item.span.attempt_id], item)]
        self._insert("insert_records", rows)
        return [bool(late) for _, _, _, late, _ in spans]

    def _add_known_call(self, attempt: _Writing, call: PackedCall) -> bool:
        """Keep a call whose span is there: perhaps this very one, perhaps an earlier try of it."""
        position, span_id, call_id, late, body = _span_row(attempt, call.span)
        [(kept_late, kept)] = self._ask("span_of", position, span_id)
        if kept != body:
            if supersedes(call.span, late, kept, bool(kept_late)):
                self._ask("drop_records", position, call_id)
                self._ask("drop_outcome", position, call_id)
                self._ask("replace_span", late, body, position, span_id)
                kept_late = late
            elif self._ask("has_records", position, call_id):
                return bool(kept_late)
        self._insert("insert_records", _record_rows(attempt, call))
        return bool(kept_late)

    def put_peers(self, items: Sequence[tuple[str, float, bytes]]) -> list[None]:
        """Per (peer id, time, body)."""
        for peer_id, seen_at, body in items:
            self._ask("forget_peers", seen_at - PEER_KEPT_S)
            self._ask("put_peer", peer_id, seen_at, body)
        return [None] * len(items)

    def drop_peers(self, peer_ids: Sequence[str]) -> list[None]:
        for peer_id in peer_ids:
            self._ask("drop_peer", peer_id)
        return [None] * len(peer_ids)

    def _writings(self, attempt_ids: Sequence[str]) -> dict[str, _Writing]:
        attempts = {
            attempt_id: _Writing(position, epoch, AttemptStatus(status).final)
            for attempt_id, position, epoch, status in self._ask_of("writers", attempt_ids)
        }
        check_known("attempt", attempt_ids, attempts)
        return attempts

    def mark_calls(self, items: Sequence[tuple[str, str, CallOutcome]]) -> list[None]:
        for attempt_id, call_id, outcome in items:
            self._mark_call(attempt_id, call_id, outcome)
        return [None] * len(items)

    def _mark_call(self, attempt_id: str, call_id: str, outcome: CallOutcome) -> None:
        for _, position, _, _ in self._ask_of("writers", [attempt_id]):
            if call_id and self._has_call(position, call_id):
                self._db.execute(self._queries["put_outcome"], (position, call_id, str(outcome)))
                return
        raise NotFoundError(f"this store knows no call {call_id!r} of {attempt_id!r}")

    def _has_call(self, position: int, call_id: str) -> bool:
        wanted = {"attempt": position, "call_id": call_id}
        return bool(self._db.execute(self._queries["has_call"], wanted).fetchone()[0])

    def _insert(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        """Insert with as few statements as possible; returns how many rows were new.

        Each statement gives up the interpreter lock, which in a busy process takes long to get
        back.
        """
        new = 0
        for start in range(0, len(rows), _ROWS_PER_STATEMENT):
            block = rows[start : start + _ROWS_PER_STATEMENT]
            query = self._queries[name]
            if len(block) > 1:
                query += (", " + query.partition("VALUES ")[2]) * (len(block) - 1)
            new += self._db.execute(query, [value for row in block for value in row]).rowcount
        return new

    def _update(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        if len(rows) == 1:
            self._db.execute(self._queries[name], rows[0])
        elif rows:
            self._db.executemany(self._queries[name], rows)

    # --- _state_machine.Tables ------------------------------------------------------------
    def next_change(self) -> int:
        ends = self._known_ends()
        ends.change += 1
        self._moved = True
        return ends.change

    def _known_ends(self) -> _Ends:
        if self._ends is None:
            [row] = self._ask("ends")
            self._ends = _Ends(*row)
        return self._ends

    def insert_rollouts(self, rows: Sequence[tuple[PackedRollout, Progress]]) -> None:
        ends = self._known_ends()
        numbered = list(enumerate(rows, ends.position + 1))
        ends.position += len(rows)
        self._insert("insert_rollouts", [_rollout_row(n, *row) for n, row in numbered])
        self._insert("insert_bodies", [(n, new.body) for n, (new, _) in numbered])

    def progress(self, rollout_ids: Sequence[str]) -> dict[str, Progress]:
        return {row[0]: _progress(row) for row in self._ask_of("progress", rollout_ids)}

    def update_rollouts(self, rows: Sequence[Progress]) -> None:
        reported = [row for row in rows if row.status in _AFTER_RUNNING]
        others = [row for row in rows if row.status not in _AFTER_RUNNING]
        self._update("update_rollouts", [_progress_row(row) for row in reported])
        self._update("update_queue", [_queue_row(row) for row in others])

    def take_queued(
        self, limit: int, run_id: str | None, alone: bool = False
    ) -> list[tuple[Progress, Rollout]]:
        if limit <= 0:
            return []
        if run_id is None:  # mostly there is one run, and its own query does less
            [(first, last)] = self._ask("ends_of_runs")
            run_id = first if first == last else None
        query = self._queries["queued" if run_id is None else "queued_of_run"]
        queued = _ALONE if alone else _QUEUED
        rows = self._db.execute(query, {"limit": limit, "run_id": run_id, "queued": queued})
        return [(_progress(row[:-1]), unpack_rollout(row[-1])) for row in rows]

    def insert_attempts(self, rows: Sequence[Attempt]) -> None:
        self._insert("insert_attempts", [_attempt_row(attempt) for attempt in rows])
        self._ends = None  # another lease may end first now

    def update_attempts(self, rows: Sequence[Attempt]) -> None:
        self._update(
            "update_attempts", [(*_moving(attempt), attempt.attempt_id) for attempt in rows]
        )
        self._ends = None  # likewise

    def expired(self, now: float, limit: int) -> list[Attempt]:
        lease = self._known_ends().lease
        if lease is None or lease > now:
            return []
        return [_attempt(row) for row in self._ask("expired", now, limit)]


class ReadTables(_Connection):
    """The reader's view: whatever was committed."""

    def resources(self, resources_id: str) -> NamedResources:
        rows = self._ask("get_resources", resources_id)
        if not rows:
            raise NotFoundError(f"this store knows no resources {resources_id!r}")
        return decode_resources(rows[0][0])

    def policy_versions(self, policy: str) -> list[PolicyVersion]:
        return [
            PolicyVersion(policy=name, version=version, run_id=run_id, step=step)
            for name, version, run_id, step in self._ask("policy_versions", policy)
        ]

    def peers(self, now: float) -> list[Peer]:
        rows = self._ask("peers", now - PEER_KEPT_S)
        return [unpack_peer(body, now - seen_at) for seen_at, body in rows]

    def rollouts(
        self, rollout_ids: Sequence[str] | None, limit: int | None, filters: dict[str, Any]
    ) -> list[RolloutState]:
        """Those that match, in the order in which they were enqueued."""
        if rollout_ids is not None:
            filters = {**filters, "rollout_ids": _ids(rollout_ids)}
            self.check_rollouts(rollout_ids)
        if filters.get("status") is not None:
            filters = {**filters, "status": _ids(filters["status"])}
        return self._states(filters, "position", -1 if limit is None else limit)

    def changes(self, cursor: int, run_id: str | None) -> Changes:
        """Everything after the cursor. The last number is read first: what moves between the two
        queries is seen again next time, never missed.
        """
        last = int(self._ask("last_change")[0][0])
        if last <= cursor:
            return Changes(cursor=cursor, rollouts=[])
        states = self._states({"cursor": cursor, "watched_run": run_id}, "change", -1)
        return Changes(cursor=max([last, *(state.change for state in states)]), rollouts=states)

    def _states(self, filters: dict[str, Any], order: str, limit: int) -> list[RolloutState]:
        values = {name: value for name, value in filters.items() if value is not None}
        where = " AND ".join(_FILTERS[name] for name in values) or "1"
        query = f"{self._queries['states']} WHERE {where} ORDER BY {order} LIMIT :limit"
        return [_state(row) for row in self._db.execute(query, {**values, "limit": limit})]

    def count(self, run_id: str | None) -> dict[RolloutStatus, int]:
        rows = self._ask("count") if run_id is None else self._ask("count_of_run", run_id)
        return {RolloutStatus(status): number for status, number in rows}

    def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        return [_attempt(row) for row in self._ask("attempts_of_rollouts", _ids(rollout_ids))]

    def attempt(self, attempt_id: str) -> Attempt:
        return find_attempts(self, [attempt_id])[attempt_id]

    def check_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """Raises `NotFoundError`."""
        stored = {row[0]: row for row in self._ask("known_rollouts", _ids(rollout_ids))}
        check_known("rollout", rollout_ids, stored)

    def claim_of_token(self, call_token: str) -> Claim | None:
        for attempt in self.attempts_by_id([attempt_of_token(call_token)]).values():
            # in constant time: how long a wrong guess takes must not tell how much of it is right
            if not secrets.compare_digest(attempt.call_token.encode(), call_token.encode()):
                return None
            body = self.bodies([attempt.rollout_id])[attempt.rollout_id]
            return Claim(rollout=unpack_rollout(body), attempt=attempt)
        return None

    def spans(self, attempt_ids: Sequence[str]) -> dict[str, list[Span]]:
        spans: dict[str, list[Span]] = {attempt_id: [] for attempt_id in attempt_ids}
        for attempt_id, body, late, outcome in self._ask("spans", _ids(list(spans))):
            spans[attempt_id].append(unpack_span(body, bool(late), outcome))
        return spans

    def token_records(self, attempt_ids: Sequence[str]) -> dict[str, list[TokenRecord]]:
        records: dict[str, list[TokenRecord]] = {attempt_id: [] for attempt_id in attempt_ids}
        rows = self._ask("token_records", _ids(list(records)))
        for attempt_id, head, *arrays, late, outcome in rows:
            records[attempt_id].append(unpack_record(head, arrays, bool(late), outcome))
        return records


def _ids(ids: Sequence[str]) -> str:
    return _json.encode(ids).decode()


def _span_row(attempt: _Writing, span: PackedSpan) -> tuple[int, str, str, bool, bytes]:
    late = span.late or attempt.late(span.epoch)
    return attempt.position, span.span_id, span.call_id, late, span.body


def _record_rows(attempt: _Writing, call: PackedCall) -> list[tuple[Any, ...]]:
    late = attempt.late(call.span.epoch)
    return [
        (
            attempt.position,
            record.call_id,
            record.choice,
            record.sequence_start,
            late or record.late,
            record.head,
            record.prompt,
            record.response,
            record.logprobs,
        )
        for record in call.records
    ]


def _rollout_row(position: int, new: PackedRollout, progress: Progress) -> tuple[Any, ...]:
    rollout = new.rollout
    return (
        position,
        rollout.rollout_id,
        rollout.run_id,
        progress.status is RolloutStatus.QUEUED,
        str(rollout.mode),
        rollout.step,
        progress.max_infrastructure_tries,
        str(progress.status),
        progress.created_at,
        progress.change,
        progress.infrastructure_tries,
        progress.attempts,
    )


def _progress_row(progress: Progress) -> tuple[Any, ...]:
    return (
        str(progress.status),
        progress.change,
        progress.infrastructure_tries,
        progress.attempts,
        progress.attempt_id,
        progress.finished_at,
        progress.rollout_id,
    )


def _queue_row(progress: Progress) -> tuple[Any, ...]:
    queued = _ALONE if progress.alone else _QUEUED
    return (queued * (progress.status is RolloutStatus.QUEUED), *_progress_row(progress))


def _progress(row: Sequence[Any]) -> Progress:
    (
        rollout_id,
        limit,
        status,
        created_at,
        change,
        tries,
        attempts,
        attempt_id,
        finished_at,
        queued,
    ) = row
    return Progress(
        rollout_id=rollout_id,
        max_infrastructure_tries=limit,
        status=RolloutStatus(status),
        created_at=created_at,
        change=change,
        infrastructure_tries=tries,
        attempts=attempts,
        attempt_id=attempt_id,
        finished_at=finished_at,
        alone=queued == _ALONE,
    )


def _state(row: Sequence[Any]) -> RolloutState:
    body, status, tries, attempt_id, created_at, finished_at, change = row
    return RolloutState(
        rollout=unpack_rollout(body),
        status=RolloutStatus(status),
        infrastructure_tries=tries,
        attempt_id=attempt_id,
        created_at=created_at,
        finished_at=finished_at,
        change=change,
    )


def _attempt_row(attempt: Attempt) -> tuple[Any, ...]:
    return (
        attempt.attempt_id,
        attempt.rollout_id,
        attempt.number,
        attempt.epoch,
        attempt.runner_id,
        attempt.call_token,
        attempt.started_at,
        *_moving(attempt),
        attempt.rollout_id,
        attempt.number,
        attempt.rollout_id,
    )


def _moving(attempt: Attempt) -> tuple[Any, ...]:
    """What may change of an attempt."""
    return (
        str(attempt.status),
        attempt.lease_until,
        attempt.ended_at,
        None if attempt.reward is None else _msgpack.encode(attempt.reward),
        None if attempt.outcome is None else str(attempt.outcome),
        attempt.message,
        _msgpack.encode(attempt.damage),
    )


def _attempt(row: Sequence[Any]) -> Attempt:
    return Attempt(
        attempt_id=row[0],
        rollout_id=row[1],
        number=row[2],
        epoch=row[3],
        status=AttemptStatus(row[4]),
        runner_id=row[5],
        call_token=row[6],
        lease_until=row[7],
        started_at=row[8],
        ended_at=row[9],
        reward=None if row[10] is None else _reward_decoder.decode(row[10]),
        outcome=None if row[11] is None else Outcome(row[11]),
        message=row[12],
        damage=_damage_decoder.decode(row[13]),
    )
