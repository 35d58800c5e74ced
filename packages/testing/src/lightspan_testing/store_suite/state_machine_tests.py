"""Tests of the state machine: the effect of each action on a rollout and its attempts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from lightspan.errors import IllegalMoveError
from lightspan.schema.records import LEGAL_ROLLOUT_MOVES, Attempt, AttemptStatus, RolloutStatus
from lightspan.stores._state_machine import MAX_UNCOUNTED_LOSSES
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    FINAL_ATTEMPTS,
    LEASE_S,
    Clock,
    StoreTests,
    claim_one,
    make_report,
    make_rollout,
    start,
    state_of,
    status_of,
)


async def bring_attempt_to(store: Store, status: AttemptStatus) -> Attempt:
    """Bring an attempt of `ro-1` to this status and return it as stored."""
    attempt = await start(store)
    if status is AttemptStatus.CANCELLED:
        await store.cancel(["ro-1"])
    elif status.final:
        await store.report([make_report(attempt, status)])
    return await store.attempt(attempt.attempt_id)


async def bring_rollout_to(store: Store, status: RolloutStatus) -> Attempt:
    """Bring `ro-1` to this status and return its attempt."""
    attempt = await start(store, max_infrastructure_tries=2)
    match status:
        case RolloutStatus.RUNNING:
            return attempt
        case RolloutStatus.CANCELLED:
            await store.cancel(["ro-1"])
            return attempt
        case RolloutStatus.QUEUED:
            await store.report([make_report(attempt, AttemptStatus.LOST)])
            return attempt
        case RolloutStatus.LOST:
            await store.report([make_report(attempt, AttemptStatus.LOST)])
            attempt = await claim_one(store)
    await store.report([make_report(attempt, AttemptStatus(status))])
    return attempt


async def _claim(store: Store, clock: Clock, attempt: Attempt) -> None:
    await store.claim("other", 10, LEASE_S)


async def _cancel(store: Store, clock: Clock, attempt: Attempt) -> None:
    await store.cancel(["ro-1"])


async def _expire(store: Store, clock: Clock, attempt: Attempt) -> None:
    clock.advance(LEASE_S + 1)
    await store.expire()


def _reporting(status: AttemptStatus) -> Action:
    async def report(store: Store, clock: Clock, attempt: Attempt) -> None:
        await store.report([make_report(attempt, status)])

    return report


Action = Callable[[Store, Clock, Attempt], Awaitable[None]]
ACTIONS: dict[str, Action] = {
    "claim": _claim,
    "cancel": _cancel,
    "expire": _expire,
    **{status.value: _reporting(status) for status in FINAL_ATTEMPTS},
}
MOVES: dict[tuple[RolloutStatus, str], RolloutStatus] = {
    (RolloutStatus.QUEUED, "claim"): RolloutStatus.RUNNING,
    (RolloutStatus.QUEUED, "cancel"): RolloutStatus.CANCELLED,
    (RolloutStatus.RUNNING, "succeeded"): RolloutStatus.SUCCEEDED,
    (RolloutStatus.RUNNING, "failed"): RolloutStatus.FAILED,
    (RolloutStatus.RUNNING, "timeout"): RolloutStatus.FAILED,
    (RolloutStatus.RUNNING, "lost"): RolloutStatus.QUEUED,
    (RolloutStatus.RUNNING, "expire"): RolloutStatus.QUEUED,
    (RolloutStatus.RUNNING, "cancelled"): RolloutStatus.CANCELLED,
    (RolloutStatus.RUNNING, "cancel"): RolloutStatus.CANCELLED,
}
"""New status by status and action; other pairs leave the status unchanged."""


class StateMachineTests(StoreTests):
    """Every pair of a status and an action, and the retries of lost attempts."""

    @pytest.mark.parametrize("after", AttemptStatus)
    @pytest.mark.parametrize("before", AttemptStatus)
    async def test_attempt_moves(
        self, store: Store, before: AttemptStatus, after: AttemptStatus
    ) -> None:
        """A running attempt ends once, a final status never changes, and `running` is not
        reported."""
        attempt = await bring_attempt_to(store, before)
        report = make_report(attempt, after, message="second")
        if not after.final:
            with pytest.raises(IllegalMoveError, match=attempt.attempt_id):
                await store.report([report])
        else:
            assert await store.report([report]) == [not before.final]
        after_action = await store.attempt(attempt.attempt_id)
        assert after_action.status is (after if not before.final and after.final else before)
        assert after_action == attempt or after_action.message == "second"

    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("before", RolloutStatus)
    async def test_rollout_moves(
        self, store: Store, clock: Clock, before: RolloutStatus, action: str
    ) -> None:
        attempt = await bring_rollout_to(store, before)
        assert await status_of(store) is before
        before_action = await state_of(store)
        await ACTIONS[action](store, clock, attempt)
        after_action = await state_of(store)
        assert after_action.status is MOVES.get((before, action), before)
        assert after_action == before_action or after_action.status is not before

    @pytest.mark.parametrize("ending", ["lost", "expire"])
    async def test_the_last_try_ends_lost(self, store: Store, clock: Clock, ending: str) -> None:
        attempt = await start(store, max_infrastructure_tries=1)
        await ACTIONS[ending](store, clock, attempt)
        state = await state_of(store)
        assert (state.status, state.infrastructure_tries) == (RolloutStatus.LOST, 1)
        assert state.finished_at == clock.now

    def test_the_table_covers_every_legal_move(self) -> None:
        lost = (RolloutStatus.RUNNING, RolloutStatus.LOST)
        covered = {(before, after) for (before, _), after in MOVES.items()} | {lost}
        assert covered == LEGAL_ROLLOUT_MOVES

    @pytest.mark.parametrize("tries", [1, 2, 3, 5])
    async def test_lost_attempts_are_retried(self, store: Store, tries: int) -> None:
        await store.enqueue([make_rollout(max_infrastructure_tries=tries)])
        for number in range(1, tries + 1):
            attempt = await claim_one(store)
            assert (attempt.number, attempt.status) == (number, AttemptStatus.RUNNING)
            assert await store.report([make_report(attempt, AttemptStatus.LOST)]) == [True]
            assert (await state_of(store)).infrastructure_tries == number
        assert await status_of(store) is RolloutStatus.LOST
        assert await store.claim("runner", 1, LEASE_S) == []
        attempts = await store.attempts(["ro-1"])
        assert [attempt.number for attempt in attempts] == list(range(1, tries + 1))
        assert [attempt.epoch for attempt in attempts] == sorted({a.epoch for a in attempts})

    async def test_uncounted_losses_use_up_no_try_but_end(self, store: Store) -> None:
        """The neighbour of a dead process is not charged, but not indefinitely."""
        await store.enqueue([make_rollout(max_infrastructure_tries=2)])
        for expected in [0] * MAX_UNCOUNTED_LOSSES + [1, 2]:
            attempt = await claim_one(store)
            report = make_report(attempt, AttemptStatus.LOST, counts=False)
            assert await store.report([report]) == [True]
            assert (await state_of(store)).infrastructure_tries == expected
        assert await status_of(store) is RolloutStatus.LOST

    async def test_counted_and_uncounted_losses_mix(self, store: Store) -> None:
        await store.enqueue([make_rollout(max_infrastructure_tries=3)])
        for counts, expected in [(True, 1), (False, 1), (True, 2), (False, 2), (True, 3)]:
            attempt = await claim_one(store)
            await store.report([make_report(attempt, AttemptStatus.LOST, counts=counts)])
            assert (await state_of(store)).infrastructure_tries == expected
        assert await status_of(store) is RolloutStatus.LOST
