"""The lease of an attempt: a runner takes it with a claim, extends it, and loses it by silence.

A lease that ran out is lost when somebody claims or expires, not before: until then its runner may
still extend it or report. Leases run by the store's clock: this machine's for a file, the server's
for a database. To lose it seals the attempt, and the rollout is queued for another one with another
epoch: what the old runner still writes is late (`is_late`), kept and never trained.

A claim can be repeated by whoever got no answer (`_requests`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from lightspan.errors import ConflictError
from lightspan.schema.records import Attempt, AttemptRef, AttemptStatus, Claim, Outcome, new_id
from lightspan.stores._encoding import unpack_rollout
from lightspan.stores._idempotency import check_id, derived_id
from lightspan.stores._state_machine import Ledger, Progress, Tables, started
from lightspan.stores._validation import LARGEST_INTEGER, check_integer, check_lease

ALONE: Final = "alone"
"""The place in its claim of a rollout that is to be run alone, and so the only one."""

_LOOK: Final = (16, 256)
"""How many places of a repeated claim are looked at in one query, at least and at most."""


class ClaimRequest(NamedTuple):
    """What a runner asks for: `Store.claim`."""

    runner_id: str
    slots: int
    lease_s: float
    run_id: str | None
    idle: bool
    request_id: str
    may_be_repeated: bool
    """Whether the caller made the id, and so may have asked under it before."""
    first: int = 0
    """How many were taken under this id before: a large claim is made in parts."""

    def part(self, taken: int, most: int) -> ClaimRequest:
        """What is left after so many were taken; of this, so many at most."""
        left = max(0, min(self.slots - taken, most))
        return self._replace(slots=left, first=taken, idle=self.idle and not taken)

    def attempt_id(self, place: int | str) -> str:
        """Of the attempt at this place in the claim."""
        return derived_id("at", self.request_id, place)


class Claimed(NamedTuple):
    """What a request was given."""

    claims: list[Claim]
    taken: int
    """How many rollouts it took at first; of one repeated later some may be lost."""


def claim_request(
    runner_id: str,
    slots: int,
    lease_s: float,
    run_id: str | None,
    idle: bool,
    request_id: str | None,
) -> ClaimRequest:
    """What `Store.claim` was asked, under an id of its own if the caller gave none.

    Raises `DataError`.
    """
    check_integer("slots", slots, low=-LARGEST_INTEGER)  # fewer than none are none
    check_lease(lease_s)
    if request_id is not None:
        check_id(request_id)
    made = new_id("claim") if request_id is None else request_id
    return ClaimRequest(runner_id, slots, lease_s, run_id, idle, made, request_id is not None)


def claim(tables: Tables, request: ClaimRequest, now: float) -> Claimed:
    """Start an attempt for each of the oldest queued rollouts; for one that is to be run alone if
    there is one and the runner is idle. A repeated request gets what it got before.

    Raises `ConflictError`.
    """
    if request.may_be_repeated and (before := _begun(tables, request)):
        return _again(tables, request, before, now)
    claims = _new_claims(tables, request, now)
    return Claimed(claims, len(claims))


def _begun(tables: Tables, request: ClaimRequest) -> list[Attempt]:
    """The attempts that this request began when it was asked before, in the order of the claim:
    all of them, however many slots it says now, or those left out would be stranded.

    Raises `ConflictError`.
    """
    ids = [request.attempt_id(ALONE), request.attempt_id(request.first)]
    found = tables.attempts_by_id(ids)
    at_once = min(max(request.slots, _LOOK[0]), _LOOK[1])
    place, goes_on = request.first + 1, ids[1] in found
    while goes_on:
        some = [request.attempt_id(each) for each in range(place, place + at_once)]
        more = tables.attempts_by_id(some)
        ids, found = ids + some, {**found, **more}
        place, goes_on = place + at_once, len(more) == at_once
    for attempt in found.values():
        if attempt.runner_id != request.runner_id:
            raise ConflictError(
                f"runner {attempt.runner_id!r} has claimed under the request id that runner "
                f"{request.runner_id!r} gives; each request needs an id of its own"
            )
    return [found[attempt_id] for attempt_id in ids if attempt_id in found]


def _again(tables: Tables, request: ClaimRequest, begun: Sequence[Attempt], now: float) -> Claimed:
    """The claim of before, without what is over. Whoever asks lives, as by a heartbeat."""
    lease_until, alone = now + request.lease_s, request.attempt_id(ALONE)
    going = [replace(each, lease_until=lease_until) for each in begun if not each.sealed]
    tables.update_attempts(going)
    bodies = tables.bodies([attempt.rollout_id for attempt in going])
    claims = [
        Claim(
            rollout=unpack_rollout(bodies[attempt.rollout_id]),
            attempt=attempt,
            alone=attempt.attempt_id == alone,
        )
        for attempt in going
    ]
    return Claimed(claims, len(begun))


def _new_claims(tables: Tables, request: ClaimRequest, now: float) -> list[Claim]:
    claims, moved = [], []
    one = min(request.slots, 1) if request.idle else 0
    taken = tables.take_queued(one, request.run_id, alone=True)
    queued = taken or tables.take_queued(request.slots, request.run_id)
    for place, (before, rollout) in enumerate(queued, request.first):
        attempt_id = request.attempt_id(ALONE if before.alone else place)
        attempt = _new_attempt(attempt_id, before, request, now)
        claims.append(Claim(rollout=rollout, attempt=attempt, alone=before.alone))
        moved.append(started(before, attempt, tables.next_change()))
    if claims:
        tables.insert_attempts([made.attempt for made in claims])
        tables.update_rollouts(moved)
    return claims


def _new_attempt(attempt_id: str, before: Progress, request: ClaimRequest, now: float) -> Attempt:
    number = before.attempts + 1
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
