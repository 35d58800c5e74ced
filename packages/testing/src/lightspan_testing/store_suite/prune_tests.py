"""Tests of pruning."""

from __future__ import annotations

import math

import pytest

from lightspan.errors import DataError, NotFoundError
from lightspan.schema.records import AttemptStatus, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    LEASE_S,
    Clock,
    StoreTests,
    claim_one,
    make_call,
    make_production,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
)

_DAY_S = 86_400.0


class PruneTests(StoreTests):
    """Rollouts that ended long ago are deleted with everything that belongs to them."""

    async def test_what_ended_long_ago_is_forgotten(self, store: Store, clock: Clock) -> None:
        lost = await start(store)
        await store.report([make_report(lost, AttemptStatus.LOST)])
        retried = await claim_one(store)
        for attempt in (lost, retried):
            await store.add_spans(ref(attempt), [make_span(attempt)])
            await store.add_calls([make_call(attempt)])
            await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.UNDELIVERED)
        await store.report([make_report(retried, reward=Reward(1.0))])
        await store.enqueue([make_rollout("ro-cancelled")])
        await store.cancel(["ro-cancelled"])
        clock.advance(2 * _DAY_S)
        recent = await start(store, "ro-recent")
        await store.report([make_report(recent, reward=Reward(0.5))])
        running = await start(store, "ro-running")
        await store.add_calls([make_call(running)])
        assert await store.prune(_DAY_S) == 2
        ids = [state.rollout.rollout_id for state in await store.rollouts()]
        assert ids == ["ro-recent", "ro-running"]
        assert await store.count() == {RolloutStatus.SUCCEEDED: 1, RolloutStatus.RUNNING: 1}
        deleted = [lost.attempt_id, retried.attempt_id]
        assert await store.attempts(["ro-1", "ro-cancelled"]) == []
        assert await store.spans(deleted) == {attempt_id: [] for attempt_id in deleted}
        assert await store.token_records(deleted) == {attempt_id: [] for attempt_id in deleted}
        assert await store.claim_of_token(retried.call_token) is None
        for ask in (
            store.rollouts(["ro-1"]),
            store.attempt(retried.attempt_id),
            store.add_spans(ref(retried), [make_span(retried)]),
        ):
            with pytest.raises(NotFoundError):
                await ask
        assert len((await store.token_records([running.attempt_id]))[running.attempt_id]) == 1
        assert [await store.prune(_DAY_S) for _ in range(2)] == [0, 0]

    async def test_what_has_not_ended_stays_however_old(self, store: Store, clock: Clock) -> None:
        await store.start([make_production("ro-open")])
        await store.enqueue([make_rollout("ro-running"), make_rollout("ro-queued")])
        attempt = await claim_one(store)
        clock.advance(30 * _DAY_S)
        await store.enqueue([make_rollout("ro-new")])
        await store.report([make_report(attempt)])  # late, so it ended just now
        assert await store.prune(_DAY_S) == 0
        assert len(await store.rollouts()) == 4

    async def test_a_cursor_misses_nothing(self, store: Store, clock: Clock) -> None:
        """The last created and the last changed rollouts stay, so that no number is reused."""
        first = await start(store, "ro-1")
        await store.enqueue([make_rollout("ro-2"), make_rollout("ro-3")])
        await store.cancel(["ro-2", "ro-3"])
        await store.report([make_report(first)])
        cursor = (await store.watch()).cursor
        clock.advance(_DAY_S)
        assert await store.prune(0.0) == 1
        ids = [state.rollout.rollout_id for state in await store.rollouts()]
        assert ids == ["ro-1", "ro-3"]
        await store.enqueue([make_rollout("ro-4")])
        changes = await store.watch(cursor)
        assert [state.rollout.rollout_id for state in changes.rollouts] == ["ro-4"]
        assert changes.cursor > cursor
        again = await claim_one(store)
        assert (again.rollout_id, await store.spans([again.attempt_id])) == (
            "ro-4",
            {again.attempt_id: []},
        )

    async def test_so_many_at_once_oldest_first(self, store: Store, clock: Clock) -> None:
        names = [f"ro-{number:03}" for number in range(300)]
        await store.enqueue([make_rollout(name) for name in names])
        await store.cancel(names)
        clock.advance(_DAY_S)
        assert await store.prune(1.0, 2) == 2
        ids = [state.rollout.rollout_id for state in await store.rollouts()]
        assert ids == names[2:]
        assert await store.prune(1.0, 290) == 290
        assert await store.prune(1.0) == 7
        assert [state.rollout.rollout_id for state in await store.rollouts()] == names[-1:]

    async def test_leases_and_queues_go_on(self, store: Store, clock: Clock) -> None:
        """Deleted rollouts are in neither leases nor queues."""
        old = await start(store, "ro-old")
        await store.enqueue([make_rollout("ro-cancelled")])
        await store.cancel(["ro-cancelled"])
        await store.report([make_report(old)])
        await store.enqueue([make_rollout("ro-new", max_infrastructure_tries=1)])
        await claim_one(store)
        clock.advance(LEASE_S + 1)
        assert await store.prune(1.0) == 2
        assert await store.expire() == 1
        assert await store.claim("runner", 5, LEASE_S) == []
        await store.enqueue([make_rollout("ro-old")])  # its id is free again
        assert (await claim_one(store)).number == 1

    @pytest.mark.parametrize(
        ("seconds", "limit", "message"),
        [(math.nan, 1, "older_than_s="), (-1.0, 1, "older_than_s="), (1.0, 0, "limit=0")],
    )
    async def test_what_is_no_age(
        self, store: Store, seconds: float, limit: int, message: str
    ) -> None:
        with pytest.raises(DataError, match=message):
            await store.prune(seconds, limit)
