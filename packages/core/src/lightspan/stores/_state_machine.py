"""The state machine of rollouts and attempts, over the few table operations that a store offers.

Written once for all stores: what may follow what is said in `schema.records`, how a lease is taken
and lost in `_leases`. Every function takes a batch of items and answers per item. It checks the
whole batch before it writes anything, so a refused batch leaves no trace even where there is no
transaction to undo.

Uncounted losses (`Report.counts=False`: a neighbour of a dead process) use up no try, but only
`MAX_UNCOUNTED_LOSSES` times per rollout: after that they count, or a task that kills its process
would be queued again for ever. No column keeps their number: every attempt before the current one
was lost, so it is the attempts so far less the infrastructure tries used up.

A rollout that is to be run alone is so once it is queued (`Progress.alone`), whoever claims it: the
supervisor that knew of the dead process may be gone. One with bad neighbours time and again is run
alone too (`MAX_BAD_NEIGHBOURS`), so that they never cost it a try.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from lightspan.errors import ConflictError, IllegalMoveError, NotFoundError
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Mode,
    Outcome,
    Report,
    Rollout,
    RolloutStatus,
    check_attempt_move,
    check_rollout_move,
    rollout_status_after,
)
from lightspan.stores._encoding import PackedRollout

MAX_UNCOUNTED_LOSSES: Final = 5
MAX_BAD_NEIGHBOURS: Final = 3
"""After so many uncounted losses a rollout is run alone."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a rollout that moves, and the limit that decides where to."""

    rollout_id: str
    max_infrastructure_tries: int
    status: RolloutStatus
    created_at: float
    change: int
    infrastructure_tries: int = 0
    attempts: int = 0
    """How many there were; the latest one's number and epoch."""
    attempt_id: str | None = None
    finished_at: float | None = None
    alone: bool = False
    """Queued, to be run alone in its process."""


class Lookup(Protocol):
    """What checks need of a store; a reader outside of transactions offers it too."""

    def bodies(self, rollout_ids: Sequence[str]) -> dict[str, bytes]:
        """The bytes of those rollouts that exist."""
        ...

    def attempts_by_id(self, attempt_ids: Sequence[str]) -> dict[str, Attempt]:
        """Those that exist."""
        ...


class Tables(Lookup, Protocol):
    """What moves need of a store, inside one transaction of its own."""

    def next_change(self) -> int:
        """The next number of the cursor of `Store.watch`."""
        ...

    def insert_rollouts(self, rows: Sequence[tuple[PackedRollout, Progress]]) -> None: ...

    def progress(self, rollout_ids: Sequence[str]) -> dict[str, Progress]:
        """Of those that exist."""
        ...

    def update_rollouts(self, rows: Sequence[Progress]) -> None: ...

    def take_queued(
        self, limit: int, run_id: str | None, alone: bool = False
    ) -> list[tuple[Progress, Rollout]]:
        """The oldest queued rollouts, of those that are to be run alone or of the others; the
        caller starts every one of them."""
        ...

    def insert_attempts(self, rows: Sequence[Attempt]) -> None: ...

    def update_attempts(self, rows: Sequence[Attempt]) -> None: ...

    def expired(self, now: float, limit: int) -> list[Attempt]:
        """Running attempts whose lease ended at `now`, in store time, or before, the earliest
        first."""
        ...


def enqueue(tables: Tables, items: Sequence[PackedRollout], now: float) -> list[None]:
    """Queue what is new. Raises `ConflictError` or `IllegalMoveError`."""
    fresh = new_ones(tables, items)
    tables.insert_rollouts([(item, _queued(item.rollout, tables, now)) for item in fresh])
    return [None] * len(items)


class Begun(NamedTuple):
    """A rollout that nobody asked for, and its attempt, which runs already."""

    new: PackedRollout
    attempt: Attempt

    @property
    def size(self) -> int:
        return self.new.size


def start(tables: Tables, items: Sequence[Begun], now: float) -> list[None]:
    """Keep what is new, running. Raises `ConflictError` or `IllegalMoveError`."""
    check_begun(items)
    # of two with one id the first counts, as in `_unknown`
    attempts = {new.rollout.rollout_id: attempt for new, attempt in reversed(items)}
    fresh = _unknown(tables, [item.new for item in items])
    made = [attempts[new.rollout.rollout_id] for new in fresh]
    running = []
    for new, attempt in zip(fresh, made, strict=True):
        before = _queued(new.rollout, tables, now)
        running.append(started(before, attempt, before.change))
    tables.insert_rollouts(list(zip(fresh, running, strict=True)))
    tables.insert_attempts(made)
    # Only now do rollouts name their attempt: one that is inserted takes what its rollout names for
    # the attempt before it.
    tables.update_rollouts(running)
    return [None] * len(items)


def check_begun(items: Iterable[Begun]) -> None:
    """Raise `IllegalMoveError` for what must be queued, or is no beginning."""
    for (rollout, _), attempt in items:
        if rollout.mode is not Mode.PRODUCTION:
            raise IllegalMoveError(
                f"rollout {rollout.rollout_id!r} has mode {rollout.mode}: it has to be enqueued "
                f"and claimed; only production starts by itself"
            )
        first = (attempt.rollout_id, attempt.number, attempt.epoch, attempt.status)
        if first != (rollout.rollout_id, 1, 1, AttemptStatus.RUNNING):
            raise IllegalMoveError(
                f"attempt {attempt.attempt_id!r} is not the first, running attempt of rollout "
                f"{rollout.rollout_id!r}"
            )


def started(before: Progress, attempt: Attempt, change: int) -> Progress:
    """A rollout whose attempt has begun."""
    check_rollout_move(before.status, RolloutStatus.RUNNING)
    return replace(
        before,
        status=RolloutStatus.RUNNING,
        alone=False,
        attempts=attempt.number,
        attempt_id=attempt.attempt_id,
        change=change,
    )


def new_ones(tables: Lookup, items: Sequence[PackedRollout]) -> list[PackedRollout]:
    """The items that the store does not know. Raises `ConflictError` or `IllegalMoveError`."""
    for item in items:
        if item.rollout.mode is Mode.PRODUCTION:
            raise IllegalMoveError(
                f"rollout {item.rollout.rollout_id!r} has mode production: nobody runs it again; "
                f"enqueue a rollout of its task (lightspan.tasks_from_store)"
            )
    return _unknown(tables, items)


def _unknown(tables: Lookup, items: Sequence[PackedRollout]) -> list[PackedRollout]:
    bodies = tables.bodies([item.rollout.rollout_id for item in items])
    return [item for item in items if _is_new(bodies, item)]


def _is_new(bodies: dict[str, bytes], item: PackedRollout) -> bool:
    rollout_id = item.rollout.rollout_id
    if rollout_id not in bodies:
        bodies[rollout_id] = item.body
        return True
    if bodies[rollout_id] != item.body:
        raise ConflictError(
            f"rollout {rollout_id!r} is already known with other content; a rollout never changes, "
            f"give the new one an id of its own"
        )
    return False


def _queued(rollout: Rollout, tables: Tables, now: float) -> Progress:
    return Progress(
        rollout_id=rollout.rollout_id,
        max_infrastructure_tries=rollout.max_infrastructure_tries,
        status=RolloutStatus.QUEUED,
        created_at=now,
        change=tables.next_change(),
    )


def report(tables: Tables, items: Sequence[Report], now: float) -> list[bool]:
    """End attempts; True where the report is in force."""
    ledger = Ledger(tables, check_reports(tables, items), now)
    in_force = [ledger.apply(item) for item in items]
    ledger.write()
    return in_force


def check_reports(tables: Lookup, items: Sequence[Report]) -> dict[str, Attempt]:
    """The attempts reported on. Raises `IllegalMoveError` or `NotFoundError`."""
    for item in items:
        if not item.status.final:
            raise IllegalMoveError(
                f"the report on attempt {item.attempt_id!r} says {item.status}, which does not "
                f"end it"
            )
    return find_attempts(tables, [item.attempt_id for item in items])


def cancel(tables: Tables, rollout_ids: Sequence[str], now: float) -> list[bool]:
    """Cancel what has not ended; True for those that this call cancelled."""
    rollouts = tables.progress(rollout_ids)
    check_known("rollout", rollout_ids, rollouts)
    running = [state.attempt_id for state in rollouts.values() if state.attempt_id is not None]
    ledger = Ledger(tables, tables.attempts_by_id(running), now, rollouts)
    cancelled = [ledger.cancel(rollout_id) for rollout_id in rollout_ids]
    ledger.write()
    return cancelled


def mark_damaged(tables: Tables, items: Sequence[tuple[str, str]]) -> list[None]:
    """Add (attempt, reason) to the capture errors, each reason once."""
    attempts = find_attempts(tables, [attempt_id for attempt_id, _ in items])
    for attempt_id, reason in items:
        before = attempts[attempt_id]
        attempts[attempt_id] = replace(
            before, capture_errors=_union(before.capture_errors, [reason])
        )
    tables.update_attempts(list(attempts.values()))
    return [None] * len(items)


def find_attempts(tables: Lookup, attempt_ids: Sequence[str]) -> dict[str, Attempt]:
    """All of them. Raises `NotFoundError`."""
    attempts = tables.attempts_by_id(attempt_ids)
    check_known("attempt", attempt_ids, attempts)
    return attempts


def check_known(what: str, ids: Iterable[str], stored: Mapping[str, object]) -> None:
    """Raise `NotFoundError` for the first id that is not stored."""
    for each in ids:
        if each not in stored:
            raise NotFoundError(f"this store knows no {what} {each!r}")


class Ledger:
    """Attempts and rollouts of one batch: read together, changed here, written together."""

    def __init__(
        self,
        tables: Tables,
        attempts: dict[str, Attempt],
        now: float,
        rollouts: dict[str, Progress] | None = None,
    ) -> None:
        if rollouts is None:
            rollouts = tables.progress([attempt.rollout_id for attempt in attempts.values()])
        self._tables = tables
        self._now = now
        self._attempts = attempts
        self._rollouts = rollouts
        self._ended: list[Attempt] = []
        self._moved: list[Progress] = []

    def apply(self, item: Report) -> bool:
        """Apply a report; True if it is in force now or was already."""
        attempt = self._attempts[item.attempt_id]
        if attempt.epoch != item.epoch:
            return False
        if attempt.sealed:
            return _says(attempt, item)
        self.end(item)
        return True

    def cancel(self, rollout_id: str) -> bool:
        """Cancel a rollout; True unless it had ended."""
        before = self._rollouts[rollout_id]
        if before.status.final:
            return False
        if before.status is RolloutStatus.RUNNING and before.attempt_id is not None:
            attempt, outcome = self._attempts[before.attempt_id], Outcome.CANCELLED
            message = "the rollout was cancelled"
            self.end(attempt.report(AttemptStatus.CANCELLED, outcome, message))
        else:
            self._move(before, RolloutStatus.CANCELLED, before.infrastructure_tries)
        return True

    def end(self, item: Report) -> None:
        """Seal a running attempt and move its rollout."""
        attempt = _sealed(self._attempts[item.attempt_id], item, self._now)
        before = self._rollouts[attempt.rollout_id]
        tries = _tries_after(before, attempt, item)
        status = rollout_status_after(attempt.status, tries, before.max_infrastructure_tries)
        has_bad_neighbours = not item.counts and before.attempts - tries >= MAX_BAD_NEIGHBOURS
        self._attempts[attempt.attempt_id] = attempt
        self._ended.append(attempt)
        self._move(before, status, tries, alone=item.alone or has_bad_neighbours)

    def _move(
        self, before: Progress, status: RolloutStatus, tries: int, alone: bool = False
    ) -> None:
        check_rollout_move(before.status, status)
        after = replace(
            before,
            status=status,
            alone=alone and status is RolloutStatus.QUEUED,
            infrastructure_tries=tries,
            finished_at=self._now if status.final else None,
            change=self._tables.next_change(),
        )
        self._rollouts[after.rollout_id] = after
        self._moved.append(after)

    def write(self) -> None:
        self._tables.update_attempts(self._ended)
        self._tables.update_rollouts(self._moved)


def _sealed(before: Attempt, item: Report, now: float) -> Attempt:
    check_attempt_move(before.status, item.status)
    return replace(
        before,
        status=item.status,
        outcome=item.outcome,
        reward=item.reward,
        message=item.message,
        capture_errors=_union(before.capture_errors, item.capture_errors),
        ended_at=now,
    )


def _tries_after(before: Progress, attempt: Attempt, item: Report) -> int:
    if attempt.status is not AttemptStatus.LOST:
        return before.infrastructure_tries
    uncounted = before.attempts - 1 - before.infrastructure_tries
    counts = item.counts or uncounted >= MAX_UNCOUNTED_LOSSES
    return before.infrastructure_tries + counts


def _says(attempt: Attempt, item: Report) -> bool:
    """True if a sealed attempt says what the report says."""
    stored = (attempt.status, attempt.outcome, attempt.reward, attempt.message)
    return stored == (item.status, item.outcome, item.reward, item.message) and set(
        item.capture_errors
    ) <= set(attempt.capture_errors)


def _union(damage: Sequence[str], more: Iterable[str]) -> list[str]:
    return list(dict.fromkeys((*damage, *more)))
