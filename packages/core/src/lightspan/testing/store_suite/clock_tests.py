"""Clocks that are set, and machines that start again: no lease ends early, none lasts for ever."""

from __future__ import annotations

import pytest

from lightspan.schema.records import Attempt, RolloutStatus
from lightspan.stores.protocol import Store
from lightspan.testing.store_suite.base import (
    LEASE_S,
    Clock,
    StoreTests,
    claim_one,
    make_rollout,
    ref,
    start,
    state_of,
    status_of,
)

HOUR_S = 3600.0
STEPS = [HOUR_S, -HOUR_S]


class ClockTests(StoreTests):
    """Leases run on elapsed time; what people are shown is what the clock says."""

    @pytest.mark.parametrize("step", STEPS)
    async def test_a_clock_that_is_set_ends_no_lease(
        self, store: Store, clock: Clock, step: float
    ) -> None:
        attempt = await start(store)
        for _ in range(3):
            clock.step(step)
            clock.advance(LEASE_S - 1)
            assert await store.expire() == 0
            assert await store.heartbeat([ref(attempt)], LEASE_S) == []
        assert await status_of(store) is RolloutStatus.RUNNING

    @pytest.mark.parametrize("step", STEPS)
    async def test_a_clock_that_is_set_prolongs_no_lease(
        self, store: Store, clock: Clock, step: float
    ) -> None:
        first = await start(store)
        clock.advance(LEASE_S / 2)
        clock.step(step)
        assert await store.claim("runner", 1, LEASE_S) == []
        clock.advance(LEASE_S / 2)
        second = await claim_one(store)
        assert (second.rollout_id, second.number) == (first.rollout_id, 2)
        clock.advance(LEASE_S)
        assert await store.expire() == 1

    @pytest.mark.parametrize("step", STEPS)
    async def test_the_store_says_how_long_a_lease_lasts_yet(
        self, store: Store, clock: Clock, step: float
    ) -> None:
        attempt = await start(store)
        clock.step(step)
        clock.advance(LEASE_S / 4)
        left = attempt.lease_until - await store.lease_time()
        assert left == pytest.approx(LEASE_S * 3 / 4)

    @pytest.mark.parametrize("step", STEPS)
    async def test_people_are_shown_what_the_clock_says(
        self, store: Store, clock: Clock, step: float
    ) -> None:
        await store.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        await claim_one(store)
        clock.step(step)
        attempt = await claim_one(store)
        assert attempt.started_at == clock.now
        assert attempt.lease_until == 1_000_000.0 + LEASE_S
        clock.advance(LEASE_S)
        assert await store.expire() == 2
        assert (await store.attempt(attempt.attempt_id)).ended_at == clock.now
        await store.cancel(["ro-1"])
        assert (await state_of(store)).finished_at == clock.now

    @pytest.mark.parametrize("step", [0.0, *STEPS])
    async def test_a_store_that_is_opened_again(self, name: str, clock: Clock, step: float) -> None:
        """By a process that knows nothing of the one before, after the clock was set."""
        async with self._durable(name, clock) as store:
            attempt = await start(store)
        clock.step(step)
        clock.advance(2)
        async with self.make_store(name, clock) as again:
            await self._lives_and_dies(again, clock, attempt)

    @pytest.mark.parametrize("step", [0.0, *STEPS])
    async def test_a_machine_that_starts_again(self, name: str, clock: Clock, step: float) -> None:
        """With that its elapsed time begins anew. Runners elsewhere live on."""
        async with self._durable(name, clock) as store:
            attempt = await start(store)
        clock.step(step)
        clock.restart()
        async with self.make_store(name, clock) as again:
            await self._lives_and_dies(again, clock, attempt)

    def _durable(self, name: str, clock: Clock) -> Store:
        store = self.make_store(name, clock)
        if not store.capabilities.durable:
            pytest.skip("not durable")
        return store

    async def _lives_and_dies(self, store: Store, clock: Clock, attempt: Attempt) -> None:
        """A lease that a heartbeat keeps, and that ends when its length has passed since."""
        assert await store.expire() == 0
        assert await store.heartbeat([ref(attempt)], LEASE_S) == []
        clock.advance(LEASE_S - 1)
        assert await store.expire() == 0
        clock.advance(1)
        assert await store.expire() == 1
        assert await status_of(store) is RolloutStatus.QUEUED

    @pytest.mark.parametrize("step", STEPS)
    async def test_two_stores_and_a_clock_that_is_set(
        self, stores: list[Store], clock: Clock, step: float
    ) -> None:
        """A lease that one keeps lives at the other, and one that nobody keeps ends."""
        one, other = stores
        await one.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        kept, dead = await claim_one(one), await claim_one(other)
        assert await one.expire() == 0  # each has seen that the other is there
        for turn in range(6):
            clock.step(step if turn % 2 else -step)
            clock.advance(LEASE_S / 6 - 1)
            assert await one.heartbeat([ref(kept)], LEASE_S) == []
            assert await other.expire() == 0
        clock.advance(LEASE_S / 6)
        assert await other.expire() == 1
        assert (await one.heartbeat([ref(kept), ref(dead)], LEASE_S)) == [ref(dead)]

    @pytest.mark.parametrize("step", [0.0, *STEPS])
    async def test_one_that_was_idle_takes_no_lease_that_it_knew_nothing_of(
        self, stores: list[Store], clock: Clock, step: float
    ) -> None:
        """It has measured an hour in which nobody looked; the other one comes anew after that, and
        perhaps after the clock was set."""
        idle, new = stores
        await idle.enqueue([make_rollout()])
        clock.advance(HOUR_S)
        clock.step(step)
        attempt = await claim_one(new)
        clock.advance(1)
        assert await idle.expire() == 0
        clock.advance(LEASE_S - 2)
        assert await idle.expire() == 0
        assert await new.heartbeat([ref(attempt)], LEASE_S) == []
        clock.advance(LEASE_S)
        assert await idle.expire() == 1
