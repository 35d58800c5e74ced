"""Change the status of rollouts and attempts, over the operations of `_sql.tables`.

All stores use this module. `schema.records` lists the legal moves; `_leases` grants and ends
leases.

Every function takes a batch of items and returns one result per item. It checks the whole batch
before it writes, so a rejected batch changes nothing even without a transaction to roll back.

A lost attempt usually uses up one of the rollout's infrastructure tries. An *uncounted loss* does
not (`Report.counts=False`), because another attempt crashed the process. A rollout may have
`MAX_UNCOUNTED_LOSSES` of them. Further losses count, because a task that crashes its process would
be queued again forever. The number of uncounted losses is computed, not stored: all earlier
attempts of a rollout were lost, and those that used up no try were uncounted.

An attempt that may have crashed its process must next run alone in a process (`Progress.alone`).
Any runner may claim such a rollout, because the supervisor of the crashed process may be gone. A
rollout with `MAX_BAD_NEIGHBOURS` uncounted losses runs alone too, so that no other attempt can
crash its process again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

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
from lightspan.stores._encoding import PackedRollout, same_rollout

if TYPE_CHECKING:
    from lightspan.stores._sql.tables import SQLTables as Lookup, WriteTables as Tables

MAX_UNCOUNTED_LOSSES: Final = 5
"""Maximum number of lost attempts of a rollout that use up no try."""
MAX_BAD_NEIGHBOURS: Final = 3
"""Number of uncounted losses after which a rollout runs alone in its process."""


class Progress(msgspec.Struct, frozen=True):
    """The changing fields of a rollout, and its limit of infrastructure tries.

    An infrastructure try is used up when an attempt is lost, for example because its runner died.
    """

    rollout_id: str
    max_infrastructure_tries: int
    status: RolloutStatus
    created_at: float
    change: int
    infrastructure_tries: int = 0
    attempts: int = 0
    """Number of attempts so far. It is the number and the epoch of the latest attempt."""
    attempt_id: str | None = None
    finished_at: float | None = None
    alone: bool = False
    """Whether the rollout is queued and must run alone in its process."""


def enqueue(tables: Tables, items: Sequence[PackedRollout], now: float) -> list[None]:
    """Queue the rollouts that are new.

    Raises:
        ConflictError: a rollout is stored with different content.
    """
    new = _select_unknown(tables, items)
    tables.insert_rollouts([(item, _queued(item.rollout, tables, now)) for item in new])
    return [None] * len(items)


class StartedRollout(NamedTuple):
    """A rollout of mode production, which no runner claims, and its running attempt."""

    packed: PackedRollout
    attempt: Attempt

    @property
    def size(self) -> int:
        return self.packed.size


def start(tables: Tables, items: Sequence[StartedRollout], now: float) -> list[None]:
    """Store the rollouts that are new, with their running attempts.

    Raises:
        ConflictError: a rollout is stored with different content.
        IllegalMoveError: a rollout has another mode than production, or its attempt is not its
            first or not running.
    """
    check_starts(items)
    # Of two items with one id the first counts, as in `_select_unknown`.
    attempts = {packed.rollout.rollout_id: attempt for packed, attempt in reversed(items)}
    new = _select_unknown(tables, [item.packed for item in items])
    new_attempts = [attempts[item.rollout.rollout_id] for item in new]
    running = []
    for item, attempt in zip(new, new_attempts, strict=True):
        before = _queued(item.rollout, tables, now)
        running.append(started(before, attempt, before.change))
    tables.insert_rollouts(list(zip(new, running, strict=True)))
    tables.insert_attempts(new_attempts)
    # Inserting an attempt records its rollout's `attempt_id` as the previous attempt, so the
    # rollouts get theirs only now.
    tables.update_rollouts(running)
    return [None] * len(items)


def check_starts(items: Iterable[StartedRollout]) -> None:
    """Raise `IllegalMoveError` unless each rollout may be stored with its running attempt.

    It may if its mode is production, and if the attempt is its first attempt and is running.
    """
    for (rollout, _), attempt in items:
        if rollout.mode is not Mode.PRODUCTION:
            raise IllegalMoveError(
                f"rollout {rollout.rollout_id!r} has mode {rollout.mode}: enqueue and claim it; "
                "only rollouts of mode production start by themselves"
            )
        first = (attempt.rollout_id, attempt.number, attempt.epoch, attempt.status)
        if first != (rollout.rollout_id, 1, 1, AttemptStatus.RUNNING):
            raise IllegalMoveError(
                f"attempt {attempt.attempt_id!r} is not the first, running attempt of rollout "
                f"{rollout.rollout_id!r}"
            )


def started(before: Progress, attempt: Attempt, change: int) -> Progress:
    """Return the progress of a queued rollout after its new attempt has started.

    Args:
        before: the progress while the rollout was queued.
        attempt: the new attempt.
        change: number of this status change (the cursor of `Store.watch`).
    """
    check_rollout_move(before.status, RolloutStatus.RUNNING)
    return replace(
        before,
        status=RolloutStatus.RUNNING,
        alone=False,
        attempts=attempt.number,
        attempt_id=attempt.attempt_id,
        change=change,
    )


def _select_unknown(tables: Tables, items: Sequence[PackedRollout]) -> list[PackedRollout]:
    """Return the rollouts that the store does not have.

    Raises:
        ConflictError: a rollout is stored with different content.
    """
    bodies = tables.bodies([item.rollout.rollout_id for item in items])
    new = []
    for item in items:
        rollout_id = item.rollout.rollout_id
        if rollout_id not in bodies:
            bodies[rollout_id] = item.body
            new.append(item)
        elif not same_rollout(bodies[rollout_id], item.body):
            raise ConflictError(
                f"rollout {rollout_id!r} is already stored with another content: a rollout never "
                "changes, so give the new one its own id"
            )
    return new


def _queued(rollout: Rollout, tables: Tables, now: float) -> Progress:
    return Progress(
        rollout_id=rollout.rollout_id,
        max_infrastructure_tries=rollout.max_infrastructure_tries,
        status=RolloutStatus.QUEUED,
        created_at=now,
        change=tables.next_change(),
    )


def report(tables: Tables, items: Sequence[Report], now: float) -> list[bool]:
    """End attempts; return for each report whether the attempt has ended as the report says.

    It is False if a different report ended the attempt, or if the attempt has another epoch by now.
    """
    attempts = find_attempts(tables, [item.attempt_id for item in items])
    ledger = Ledger(tables, attempts, now)
    in_force = [ledger.apply(item) for item in items]
    ledger.write()
    return in_force


def cancel(tables: Tables, rollout_ids: Sequence[str], now: float) -> list[bool]:
    """Cancel rollouts; return for each whether it was cancelled. False if it had already ended."""
    rollouts = tables.progress(rollout_ids)
    check_known("rollout", rollout_ids, rollouts)
    running = [state.attempt_id for state in rollouts.values() if state.attempt_id is not None]
    ledger = Ledger(tables, tables.attempts_by_id(running), now, rollouts)
    cancelled = [ledger.cancel(rollout_id) for rollout_id in rollout_ids]
    ledger.write()
    return cancelled


def mark_damaged(tables: Tables, items: Sequence[tuple[str, str]]) -> list[None]:
    """Add capture errors to attempts; each item is an (attempt id, error message).

    A new error is a change of the rollout. An error that the attempt already has is not added.

    Raises:
        NotFoundError: an attempt is unknown.
    """
    before = find_attempts(tables, [attempt_id for attempt_id, _ in items])
    attempts = dict(before)
    for attempt_id, reason in items:
        errors = _union(attempts[attempt_id].capture_errors, [reason])
        attempts[attempt_id] = replace(attempts[attempt_id], capture_errors=errors)
    changed = [attempt for attempt in attempts.values() if attempt != before[attempt.attempt_id]]
    tables.update_attempts(changed)
    touch(tables, [attempt.attempt_id for attempt in changed])
    return [None] * len(items)


def touch(tables: Tables, attempt_ids: Iterable[str]) -> None:
    """Count a change of the rollouts of attempts, so that `Store.watch` returns them again."""
    attempts = tables.attempts_by_id(list(attempt_ids)).values()
    rollouts = tables.progress(list({attempt.rollout_id for attempt in attempts}))
    tables.update_rollouts([replace(r, change=tables.next_change()) for r in rollouts.values()])


def find_attempts(tables: Lookup, attempt_ids: Sequence[str]) -> dict[str, Attempt]:
    """Return the attempts by id; raise `NotFoundError` if one is unknown."""
    attempts = tables.attempts_by_id(attempt_ids)
    check_known("attempt", attempt_ids, attempts)
    return attempts


def check_known(what: str, ids: Iterable[str], stored: Mapping[str, object]) -> None:
    """Raise `NotFoundError` for the first of `ids` that is not a key of `stored`.

    Args:
        what: what the ids name, such as `attempt`, for the error message.
    """
    for id in ids:
        if id not in stored:
            raise NotFoundError(f"this store has no {what} {id!r}")


@dataclass(slots=True)
class Ledger:
    """Read the attempts and rollouts of a batch, change them here, then write all changes."""

    tables: Tables
    attempts: dict[str, Attempt]
    now: float
    rollouts: dict[str, Progress] = field(default_factory=dict)
    """Progress by rollout id. If empty, the progress of the rollouts of `attempts` is read."""
    _ended: list[Attempt] = field(default_factory=list)
    _moved: list[Progress] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.rollouts:
            ids = [attempt.rollout_id for attempt in self.attempts.values()]
            self.rollouts = self.tables.progress(ids)

    def apply(self, item: Report) -> bool:
        """End an attempt by the report `item`; return whether the attempt ended as `item` says.

        It is False if a different report has ended the attempt. It is also False if the report's
        epoch is not the attempt's, because the runner that sent the report has lost the attempt.
        """
        attempt = self.attempts[item.attempt_id]
        if attempt.epoch != item.epoch:
            return False
        if attempt.sealed:
            return _has_same_end(attempt, item)
        self.end(item)
        return True

    def cancel(self, rollout_id: str) -> bool:
        """Cancel a rollout; return False if it had already ended."""
        before = self.rollouts[rollout_id]
        if before.status.final:
            return False
        if before.status is RolloutStatus.RUNNING and before.attempt_id is not None:
            attempt = self.attempts[before.attempt_id]
            status, outcome = AttemptStatus.CANCELLED, Outcome.CANCELLED
            self.end(attempt.report(status, outcome, "the rollout was cancelled"))
        else:
            self._move(before, RolloutStatus.CANCELLED, before.infrastructure_tries)
        return True

    def end(self, item: Report) -> None:
        """End a running attempt, and move its rollout to the status that follows."""
        attempt = _sealed(self.attempts[item.attempt_id], item, self.now)
        before = self.rollouts[attempt.rollout_id]
        tries = _tries_after(before, attempt, item)
        status = rollout_status_after(attempt.status, tries, before.max_infrastructure_tries)
        has_bad_neighbours = not item.counts and before.attempts - tries >= MAX_BAD_NEIGHBOURS
        self.attempts[attempt.attempt_id] = attempt
        self._ended.append(attempt)
        self._move(before, status, tries, alone=item.alone or has_bad_neighbours)

    def _move(self, old: Progress, status: RolloutStatus, tries: int, alone: bool = False) -> None:
        check_rollout_move(old.status, status)
        after = replace(
            old,
            status=status,
            alone=alone and status is RolloutStatus.QUEUED,
            infrastructure_tries=tries,
            finished_at=self.now if status.final else None,
            change=self.tables.next_change(),
        )
        self.rollouts[after.rollout_id] = after
        self._moved.append(after)

    def write(self) -> None:
        self.tables.update_attempts(self._ended)
        self.tables.update_rollouts(self._moved)


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
    return before.infrastructure_tries + (item.counts or uncounted >= MAX_UNCOUNTED_LOSSES)


def _has_same_end(attempt: Attempt, item: Report) -> bool:
    """Return whether an ended attempt ended as the report says."""
    stored = (attempt.status, attempt.outcome, attempt.reward, attempt.message)
    return stored == (item.status, item.outcome, item.reward, item.message) and set(
        item.capture_errors
    ) <= set(attempt.capture_errors)


def _union(errors: Sequence[str], more: Iterable[str]) -> list[str]:
    return list(dict.fromkeys((*errors, *more)))
