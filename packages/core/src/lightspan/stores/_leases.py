"""Grant leases of attempts by claims, extend them by heartbeats, and end expired leases.

A lease is the time for which a runner holds an attempt. An expired lease ends at the next call of
`claim` or `expire`. Until then its runner may still extend it or report. Leases use the store's
clock: this machine's for a file, the server's for a database.

When a lease ends, its attempt is lost. While tries are left, the rollout is queued for another
attempt with another epoch. What the old runner writes later is stored as late
(`AttemptKey.is_late`) and never trained.

A claim can be repeated by a runner that got no answer (`derived_id`). No table of requests is
needed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from lightspan.schema.records import Attempt, AttemptRef, AttemptStatus, Claim, Outcome
from lightspan.stores._encoding import unpack_rollout
from lightspan.stores._state_machine import Ledger, Progress, started

if TYPE_CHECKING:
    from lightspan.stores._sql.tables import WriteTables as Tables

ALONE: Final = "alone"
"""The place (`derived_id`) of a rollout that must run alone; the places of other rollouts are
numbers. Such a rollout is the only rollout of its claim."""

_LOOKUP_SIZES: Final = (16, 256)
"""Minimum and maximum number of attempts of a repeated claim to look up in one query."""


class ClaimRequest(NamedTuple):
    """The arguments of `Store.claim`."""

    runner_id: str
    slots: int
    lease_s: float
    run_id: str | None
    idle: bool
    request_id: str
    may_be_repeated: bool
    """Whether the caller made `request_id`, and so may have sent this request before."""
    first: int = 0
    """Number of rollouts that earlier parts of this claim have claimed. A large claim is made in
    parts."""

    def part(self, claimed: int, max_slots: int) -> ClaimRequest:
        """Return a request for what is left of this one after `claimed` rollouts were claimed.

        It asks for at most `max_slots` rollouts.
        """
        slots = max(0, min(self.slots - claimed, max_slots))
        return self._replace(slots=slots, first=claimed, idle=self.idle and not claimed)

    def attempt_id(self, place: int | str) -> str:
        """Return the id of the attempt at the place `place` of the claim (`derived_id`)."""
        return derived_id("at", self.request_id, place)


def derived_id(prefix: str, request_id: str, place: int | str) -> str:
    """Derive an id in the format of `new_id` from a request id and a place in the request.

    A runner that got no answer repeats its request with the same id. The same attempt ids are
    derived, so the store finds the attempts that the first request started.

    The result contains the time in the request id and a hash of the rest. The request id cannot be
    computed from it. So an app, which knows its attempt's id, cannot repeat the claim of its
    runner.

    Args:
        prefix: beginning of the id.
        request_id: id of the request, which `records.new_id` made.
        place: number of the item in the request, or a word for a special item.
    """
    time = request_id.partition("-")[2][:16]
    text = f"{request_id}/{place}".encode()
    return f"{prefix}-{time}{hashlib.blake2b(text, digest_size=8).hexdigest()}"


class Claimed(NamedTuple):
    """The result of a claim request."""

    claims: list[Claim]
    total: int
    """Number of rollouts that the request claimed when it was first made. It includes rollouts
    whose attempts have ended since."""


def claim(tables: Tables, request: ClaimRequest, now: float) -> Claimed:
    """Claim the oldest queued rollouts, or return the earlier claim of a repeated request.

    For an idle runner, rollouts that must run alone are claimed first, one at a time.

    Raises:
        ConflictError: another runner has claimed under this request id.
    """
    if request.may_be_repeated and (attempts := _earlier_attempts(tables, request)):
        return _claim_again(tables, request, attempts, now)
    claims = _new_claims(tables, request, now)
    return Claimed(claims, len(claims))


def _earlier_attempts(tables: Tables, request: ClaimRequest) -> list[Attempt]:
    """Return all attempts that an earlier request with the same id started, in the claim's order.

    There may be more than `request.slots`. All are returned, because no other runner runs them.
    """
    ids = [request.attempt_id(ALONE), request.attempt_id(request.first)]
    attempts = tables.attempts_by_id(ids)
    size = min(max(request.slots, _LOOKUP_SIZES[0]), _LOOKUP_SIZES[1])
    place, has_more = request.first + 1, ids[1] in attempts
    while has_more:
        next_ids = [request.attempt_id(number) for number in range(place, place + size)]
        more = tables.attempts_by_id(next_ids)
        ids, attempts = ids + next_ids, {**attempts, **more}
        place, has_more = place + size, len(more) == size
    return [attempts[attempt_id] for attempt_id in ids if attempt_id in attempts]


def _claim_again(
    tables: Tables, request: ClaimRequest, attempts: Sequence[Attempt], now: float
) -> Claimed:
    """Extend the leases of an earlier claim's running attempts, and return these attempts."""
    lease_until, alone_id = now + request.lease_s, request.attempt_id(ALONE)
    running = [replace(each, lease_until=lease_until) for each in attempts if not each.sealed]
    tables.update_attempts(running)
    bodies = tables.bodies([attempt.rollout_id for attempt in running])
    claims = [
        Claim(
            rollout=unpack_rollout(bodies[attempt.rollout_id]),
            attempt=attempt,
            alone=attempt.attempt_id == alone_id,
        )
        for attempt in running
    ]
    return Claimed(claims, len(attempts))


def _new_claims(tables: Tables, request: ClaimRequest, now: float) -> list[Claim]:
    claims, moved = [], []
    queued = tables.dequeue(request.slots, request.run_id, is_idle=request.idle)
    for place, (before, rollout) in enumerate(queued, request.first):
        attempt_id = request.attempt_id(ALONE if before.alone else place)
        attempt = _new_attempt(attempt_id, before, request, now)
        claims.append(Claim(rollout=rollout, attempt=attempt, alone=before.alone))
        moved.append(started(before, attempt, tables.next_change()))
    if claims:
        tables.insert_attempts([claim.attempt for claim in claims])
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
        # The token contains the attempt's id, so no store needs an index of tokens.
        call_token=f"{attempt_id}.{secrets.token_urlsafe(24)}",
        lease_until=now + request.lease_s,
        started_at=now,
    )


def attempt_of_token(call_token: str) -> str:
    """Return the attempt id that is part of a call token.

    The caller must still compare the token with the attempt's `call_token`.
    """
    return call_token.rpartition(".")[0]


def heartbeat(tables: Tables, items: Sequence[tuple[AttemptRef, float]], now: float) -> list[bool]:
    """Extend leases; return for each item whether its lease was extended.

    A lease is not extended if the attempt has ended or has another epoch than the item.

    Args:
        tables: the tables of the store.
        items: pairs (attempt, seconds from now at which its lease shall expire).
        now: the store's time.
    """
    attempts = tables.attempts_by_id([ref.attempt_id for ref, _ in items])
    current = {key: attempt.epoch for key, attempt in attempts.items() if not attempt.sealed}
    extended = [current.get(ref.attempt_id) == ref.epoch for ref, _ in items]
    tables.update_attempts(
        [
            replace(attempts[ref.attempt_id], lease_until=now + lease_s)
            for (ref, lease_s), is_extended in zip(items, extended, strict=True)
            if is_extended
        ]
    )
    return extended


def expire(tables: Tables, limit: int, now: float) -> int:
    """End at most `limit` attempts whose lease expired; return how many."""
    expired = tables.expired(now, limit)
    if not expired:
        return 0
    ledger = Ledger(tables, {attempt.attempt_id: attempt for attempt in expired}, now)
    for attempt in expired:
        message = f"the lease of runner {attempt.runner_id!r} ran out"
        ledger.end(attempt.report(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, message))
    ledger.write()
    return len(expired)
