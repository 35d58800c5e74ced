"""The moves of the state machine, written once over the few table operations that a store offers.

Every function takes a batch of items and answers per item. It checks the whole batch before it
writes anything, so a refused batch leaves no trace even where there is no transaction to undo.

Uncounted losses (`Report.counts=False`: a neighbour of a dead process) use up no try, but only
`MAX_UNCOUNTED_LOSSES` times per rollout: after that they count, or a task that kills its process
would be queued again for ever. No column keeps their number: every attempt before the current one
was lost, so it is the attempts so far less the infrastructure tries used up.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from lightspan.errors import ConflictError, DataError, IllegalMoveError, NotFoundError
from lightspan.records import (
    Attempt,
    AttemptRef,
    AttemptStatus,
    Claim,
    Mode,
    Outcome,
    Report,
    Rollout,
    RolloutStatus,
    check_attempt_move,
    check_rollout_move,
    new_id,
    rollout_status_after,
)

MAX_UNCOUNTED_LOSSES: Final = 5
PEER_KEPT_S: Final = 86_400.0
"""How long a peer that is silent is remembered."""

_replace = msgspec.structs.replace


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


class NewRollout(NamedTuple):
    """A rollout to enqueue and its canonical bytes."""

    rollout: Rollout
    body: bytes


class ClaimRequest(NamedTuple):
    runner_id: str
    slots: int
    lease_s: float
    run_id: str | None


class HasBodies(Protocol):
    def bodies(self, rollout_ids: Sequence[str]) -> dict[str, bytes]:
        """The bytes of those that exist."""
        ...


class HasAttempts(Protocol):
    def attempts_by_id(self, attempt_ids: Sequence[str]) -> dict[str, Attempt]:
        """Those that exist."""
        ...


class Tables(HasBodies, HasAttempts, Protocol):
    """What the moves need of a store, inside one transaction of its own."""

    def next_change(self) -> int:
        """The next number of the cursor of `Store.watch`."""
        ...

    def insert_rollouts(self, rows: Sequence[tuple[NewRollout, Progress]]) -> None: ...

    def progress(self, rollout_ids: Sequence[str]) -> dict[str, Progress]:
        """Of those that exist."""
        ...

    def update_rollouts(self, rows: Sequence[Progress]) -> None: ...

    def take_queued(self, limit: int, run_id: str | None) -> list[tuple[Progress, Rollout]]:
        """The oldest queued rollouts; the caller starts every one of them."""
        ...

    def insert_attempts(self, rows: Sequence[Attempt]) -> None: ...

    def update_attempts(self, rows: Sequence[Attempt]) -> None: ...

    def expired(self, now: float, limit: int) -> list[Attempt]:
        """Running attempts whose lease ended at `now` or before, the earliest first."""
        ...


def enqueue(tables: Tables, items: Sequence[NewRollout], now: float) -> list[None]:
    """Queue what is new. Raises `ConflictError` or `IllegalMoveError`."""
    fresh = new_ones(tables, items)
    tables.insert_rollouts([(item, _waiting(item.rollout, tables, now)) for item in fresh])
    return [None] * len(items)


class Begun(NamedTuple):
    """A rollout that nobody asked for, and its attempt, which runs already."""

    new: NewRollout
    attempt: Attempt


def start(tables: Tables, items: Sequence[Begun], now: float) -> list[None]:
    """Keep what is new, running. Raises `ConflictError` or `IllegalMoveError`."""
    check_begun(items)
    by_id = {item.new.rollout.rollout_id: item for item in reversed(items)}
    fresh = _unknown(tables, [item.new for item in items])
    begun = [by_id[new.rollout.rollout_id] for new in fresh]
    running = [_running(item, tables, now) for item in begun]
    tables.insert_rollouts([(item.new, made) for item, made in zip(begun, running, strict=True)])
    tables.insert_attempts([item.attempt for item in begun])
    tables.update_rollouts(running)
    return [None] * len(items)


def check_begun(items: Iterable[Begun]) -> None:
    """Raise `IllegalMoveError` for what must be queued, or is no beginning."""
    for (rollout, _), attempt in items:
        if rollout.mode is not Mode.PRODUCTION:
            raise IllegalMoveError(
                f"rollout {rollout.rollout_id!r} is of mode {rollout.mode}: it has to be enqueued "
                f"and claimed; only production starts by itself"
            )
        first = (attempt.rollout_id, attempt.number, attempt.epoch, attempt.status)
        if first != (rollout.rollout_id, 1, 1, AttemptStatus.RUNNING):
            raise IllegalMoveError(
                f"attempt {attempt.attempt_id!r} is not the first, running attempt of rollout "
                f"{rollout.rollout_id!r}"
            )


def _running(begun: Begun, tables: Tables, now: float) -> Progress:
    return _replace(
        _waiting(begun.new.rollout, tables, now),
        status=RolloutStatus.RUNNING,
        attempts=1,
        attempt_id=begun.attempt.attempt_id,
    )


def new_ones(tables: HasBodies, items: Sequence[NewRollout]) -> list[NewRollout]:
    """Those that the store does not know. Raises `ConflictError` or `IllegalMoveError`."""
    for item in items:
        if item.rollout.mode is Mode.PRODUCTION:
            raise IllegalMoveError(
                f"rollout {item.rollout.rollout_id!r} is of mode production: nobody runs it again; "
                f"enqueue a rollout of its task (lightspan.tasks_from_store)"
            )
    return _unknown(tables, items)


def _unknown(tables: HasBodies, items: Sequence[NewRollout]) -> list[NewRollout]:
    bodies = tables.bodies([item.rollout.rollout_id for item in items])
    return [item for item in items if _is_new(bodies, item)]


def _is_new(bodies: dict[str, bytes], item: NewRollout) -> bool:
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


def _waiting(rollout: Rollout, tables: Tables, now: float) -> Progress:
    return Progress(
        rollout_id=rollout.rollout_id,
        max_infrastructure_tries=rollout.max_infrastructure_tries,
        status=RolloutStatus.QUEUED,
        created_at=now,
        change=tables.next_change(),
    )


def claim(tables: Tables, request: ClaimRequest, now: float) -> list[Claim]:
    """Start an attempt for each of the oldest queued rollouts."""
    claims = []
    started = []
    for before, rollout in tables.take_queued(request.slots, request.run_id):
        attempt = _new_attempt(before, request, now)
        claims.append(Claim(rollout=rollout, attempt=attempt))
        started.append(_started(before, attempt, tables.next_change()))
    if claims:
        tables.insert_attempts([made.attempt for made in claims])
        tables.update_rollouts(started)
    return claims


def _new_attempt(before: Progress, request: ClaimRequest, now: float) -> Attempt:
    number = before.attempts + 1
    attempt_id = new_id("at")
    return Attempt(
        attempt_id=attempt_id,
        rollout_id=before.rollout_id,
        number=number,
        epoch=number,
        runner_id=request.runner_id,
        call_token=f"{attempt_id}.{secrets.token_urlsafe(24)}",
        lease_until=now + request.lease_s,
        started_at=now,
    )


def attempt_of_token(call_token: str) -> str:
    """The attempt that a call token says it opens. Whether it does, the attempt's own tells."""
    return call_token.rpartition(".")[0]


def _started(before: Progress, attempt: Attempt, change: int) -> Progress:
    check_rollout_move(before.status, RolloutStatus.RUNNING)
    return _replace(
        before,
        status=RolloutStatus.RUNNING,
        attempts=attempt.number,
        attempt_id=attempt.attempt_id,
        change=change,
    )


def heartbeat(tables: Tables, items: Sequence[tuple[AttemptRef, float]], now: float) -> list[bool]:
    """Extend the lease of each attempt that is still this writer's; True for those."""
    attempts = tables.attempts_by_id([ref.attempt_id for ref, _ in items])
    mine = [_is_mine(attempts.get(ref.attempt_id), ref) for ref, _ in items]
    tables.update_attempts(
        [
            _replace(attempts[ref.attempt_id], lease_until=now + lease_s)
            for (ref, lease_s), is_mine in zip(items, mine, strict=True)
            if is_mine
        ]
    )
    return mine


def _is_mine(attempt: Attempt | None, ref: AttemptRef) -> bool:
    return attempt is not None and not is_late(attempt, ref.epoch)


def is_late(attempt: Attempt, epoch: int) -> bool:
    """True if a write under this epoch comes after the lease was lost or the attempt sealed."""
    return attempt.sealed or attempt.epoch != epoch


def report(tables: Tables, items: Sequence[Report], now: float) -> list[bool]:
    """End attempts; True where the report is in force."""
    ledger = _Ledger(tables, check_reports(tables, items), now)
    in_force = [ledger.apply(item) for item in items]
    ledger.write()
    return in_force


def check_reports(tables: HasAttempts, items: Sequence[Report]) -> dict[str, Attempt]:
    """The attempts reported on. Raises `IllegalMoveError` or `NotFoundError`."""
    for item in items:
        if not item.status.final:
            raise IllegalMoveError(
                f"the report on attempt {item.attempt_id!r} says {item.status}, which does not "
                f"end it"
            )
    return find_attempts(tables, [item.attempt_id for item in items])


def expire(tables: Tables, limit: int, now: float) -> int:
    """Lose at most `limit` attempts whose lease ran out; returns how many."""
    expired = tables.expired(now, limit)
    if not expired:
        return 0
    ledger = _Ledger(tables, {attempt.attempt_id: attempt for attempt in expired}, now)
    for attempt in expired:
        ledger.end(_lease_lost(attempt))
    ledger.write()
    return len(expired)


def cancel(tables: Tables, rollout_ids: Sequence[str], now: float) -> list[bool]:
    """Cancel what has not ended; True for those that this call cancelled."""
    rollouts = tables.progress(rollout_ids)
    check_known("rollout", rollout_ids, rollouts)
    running = [found.attempt_id for found in rollouts.values() if found.attempt_id is not None]
    ledger = _Ledger(tables, tables.attempts_by_id(running), now, rollouts)
    cancelled = [ledger.cancel(rollout_id) for rollout_id in rollout_ids]
    ledger.write()
    return cancelled


def mark_damaged(tables: Tables, items: Sequence[tuple[str, str]]) -> list[None]:
    """Add (attempt, reason) to the capture errors, each reason once."""
    attempts = find_attempts(tables, [attempt_id for attempt_id, _ in items])
    for attempt_id, reason in items:
        before = attempts[attempt_id]
        attempts[attempt_id] = _replace(before, damage=_union(before.damage, [reason]))
    tables.update_attempts(list(attempts.values()))
    return [None] * len(items)


def find_attempts(tables: HasAttempts, attempt_ids: Sequence[str]) -> dict[str, Attempt]:
    """All of them. Raises `NotFoundError`."""
    attempts = tables.attempts_by_id(attempt_ids)
    check_known("attempt", attempt_ids, attempts)
    return attempts


def check_known(what: str, ids: Iterable[str], known: Mapping[str, object]) -> None:
    """Raise `NotFoundError` for the first id that is not known."""
    for one in ids:
        if one not in known:
            raise NotFoundError(f"this store knows no {what} {one!r}")


def check_owner(owner: str, what: str, attempt_id: str) -> None:
    """Raise `DataError` where something is written to one attempt and names another."""
    if owner not in ("", attempt_id):
        raise DataError(f"{what} is of attempt {owner!r} but was written to {attempt_id!r}")


class _Ledger:
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
            self.end(_cancelled(self._attempts[before.attempt_id]))
        else:
            self._move(before, RolloutStatus.CANCELLED, before.infrastructure_tries)
        return True

    def end(self, item: Report) -> None:
        """Seal a running attempt and move its rollout."""
        attempt = _sealed(self._attempts[item.attempt_id], item, self._now)
        before = self._rollouts[attempt.rollout_id]
        tries = _tries_after(before, attempt, item)
        status = rollout_status_after(attempt.status, tries, before.max_infrastructure_tries)
        self._attempts[attempt.attempt_id] = attempt
        self._ended.append(attempt)
        self._move(before, status, tries)

    def _move(self, before: Progress, status: RolloutStatus, tries: int) -> None:
        check_rollout_move(before.status, status)
        after = _replace(
            before,
            status=status,
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
    return _replace(
        before,
        status=item.status,
        outcome=item.outcome,
        reward=item.reward,
        message=item.message,
        damage=_union(before.damage, item.damage),
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
        item.damage
    ) <= set(attempt.damage)


def _lease_lost(attempt: Attempt) -> Report:
    return Report(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        status=AttemptStatus.LOST,
        outcome=Outcome.INFRASTRUCTURE,
        message=f"the lease of runner {attempt.runner_id!r} ran out",
    )


def _cancelled(attempt: Attempt) -> Report:
    return Report(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        status=AttemptStatus.CANCELLED,
        outcome=Outcome.CANCELLED,
        message="the rollout was cancelled",
    )


def _union(known: Sequence[str], more: Iterable[str]) -> list[str]:
    return list(dict.fromkeys((*known, *more)))
