"""The lease of an attempt: a runner takes it with a claim, extends it, and loses it by silence.

A lease that ran out is lost when somebody claims or expires, not before: until then its runner may
still extend it or report. To lose it seals the attempt, and the rollout is queued for another one
with another epoch: what the old runner still writes is late (`is_late`), kept and never trained.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from lightspan.schema.records import Attempt, AttemptRef, AttemptStatus, Claim, Outcome, new_id
from lightspan.stores._state_machine import Ledger, Progress, Tables, started


class ClaimRequest(NamedTuple):
    """What a runner asks for: `Store.claim`."""

    runner_id: str
    slots: int
    lease_s: float
    run_id: str | None
    idle: bool = True


def claim(tables: Tables, request: ClaimRequest, now: float) -> list[Claim]:
    """Start an attempt for each of the oldest queued rollouts; for one that is to be run alone if
    there is one and the runner is idle."""
    claims, moved = [], []
    one = min(request.slots, 1) if request.idle else 0
    taken = tables.take_queued(one, request.run_id, alone=True)
    for before, rollout in taken or tables.take_queued(request.slots, request.run_id):
        attempt = _new_attempt(before, request, now)
        claims.append(Claim(rollout=rollout, attempt=attempt, alone=before.alone))
        moved.append(started(before, attempt, tables.next_change()))
    if claims:
        tables.insert_attempts([made.attempt for made in claims])
        tables.update_rollouts(moved)
    return claims


def _new_attempt(before: Progress, request: ClaimRequest, now: float) -> Attempt:
    number = before.attempts + 1
    attempt_id = new_id("at")
    return Attempt(
        attempt_id=attempt_id,
        rollout_id=before.rollout_id,
        number=number,
        epoch=number,  # grows with each claim, as an epoch must
        runner_id=request.runner_id,
        # it names the attempt that it opens, so that no store needs an index of tokens
        call_token=f"{attempt_id}.{secrets.token_urlsafe(24)}",
        lease_until=now + request.lease_s,
        started_at=now,
    )


def attempt_of_token(call_token: str) -> str:
    """The id of the attempt that a call token claims to open; whether it does, only the token
    kept with that attempt can tell."""
    return call_token.rpartition(".")[0]


def heartbeat(tables: Tables, items: Sequence[tuple[AttemptRef, float]], now: float) -> list[bool]:
    """Extend the lease of each attempt that is still this writer's; True for those."""
    attempts = tables.attempts_by_id([ref.attempt_id for ref, _ in items])
    mine = [_is_mine(attempts.get(ref.attempt_id), ref) for ref, _ in items]
    tables.update_attempts(
        [
            replace(attempts[ref.attempt_id], lease_until=now + lease_s)
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


def expire(tables: Tables, limit: int, now: float) -> int:
    """Lose at most `limit` attempts whose lease ran out; returns how many."""
    expired = tables.expired(now, limit)
    if not expired:
        return 0
    ledger = Ledger(tables, {attempt.attempt_id: attempt for attempt in expired}, now)
    for attempt in expired:
        message = f"the lease of runner {attempt.runner_id!r} ran out"
        ledger.end(attempt.report(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, message))
    ledger.write()
    return len(expired)
