"""Tests of watching."""

from __future__ import annotations

import asyncio

import msgspec

from lightspan.schema.records import AttemptStatus
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    LEASE_S,
    StoreTests,
    claim_one,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
)


class WatchTests(StoreTests):
    """A cursor yields every change once."""

    async def test_watch_from_every_cursor(self, store: Store) -> None:
        """From any cursor, the changes after it are returned, once each, oldest first."""
        await store.enqueue([make_rollout(f"ro-{i}", run_id="ab"[i % 2]) for i in range(4)])
        first = await claim_one(store)
        second = await claim_one(store)
        await store.report([make_report(second), make_report(first, AttemptStatus.LOST)])
        await store.cancel(["ro-3"])
        everything = await store.watch()
        names = [state.rollout.rollout_id for state in everything.rollouts]
        assert names == ["ro-2", "ro-1", "ro-0", "ro-3"]
        changes = [state.change for state in everything.rollouts]
        assert changes == sorted(set(changes))
        assert everything.cursor == changes[-1]
        for cursor in range(everything.cursor + 2):
            later = await store.watch(cursor)
            assert later.rollouts == [s for s in everything.rollouts if s.change > cursor]
            assert later.cursor == max(cursor, everything.cursor)
            of_run = await store.watch(cursor, run_id="b")
            assert of_run.rollouts == [s for s in later.rollouts if s.rollout.run_id == "b"]
            assert cursor <= of_run.cursor <= later.cursor
        assert await store.rollouts() == sorted(
            everything.rollouts, key=lambda state: state.rollout.rollout_id
        )

    async def test_watch_of_an_empty_store(self, store: Store) -> None:
        changes = await store.watch(timeout_s=0.01)
        assert (changes.cursor, changes.rollouts) == (0, [])

    async def test_watch_wakes_up(self, store: Store) -> None:
        watching = asyncio.create_task(store.watch(timeout_s=60))
        await asyncio.sleep(0)
        await store.enqueue([make_rollout()])
        changes = await watching
        assert [state.rollout.rollout_id for state in changes.rollouts] == ["ro-1"]

    async def test_watch_sees_every_ending(self, store: Store) -> None:
        """A watcher that follows its cursor sees every rollout end."""
        names = {f"ro-{i}" for i in range(40)}

        async def work() -> None:
            while claims := await store.claim("runner", 3, LEASE_S):
                await store.report([make_report(claim.attempt) for claim in claims])

        async def follow() -> set[str]:
            ended: set[str] = set()
            cursor = 0
            while ended != names:
                changes = await store.watch(cursor, timeout_s=10)
                assert changes.rollouts
                cursor = changes.cursor
                ended |= {s.rollout.rollout_id for s in changes.rollouts if s.status.final}
            return ended

        await store.enqueue([make_rollout(name) for name in sorted(names)])
        _, _, ended = await asyncio.gather(work(), work(), follow())
        assert ended == names

    async def test_writes_that_move_nothing_wake_nobody(self, store: Store) -> None:
        attempt = await start(store)
        before = await store.watch()
        await store.add_spans(ref(attempt), [make_span(attempt)])
        await store.heartbeat([ref(attempt)], LEASE_S)
        await store.mark_damaged(attempt.attempt_id, "reason")
        assert await store.watch() == before

    async def test_work_is_what_is_queued_of_the_runs_that_are_asked_for(
        self, store: Store
    ) -> None:
        assert [await store.await_work(runs) for runs in (None, [], ["a"])] == [False] * 3
        await store.enqueue([make_rollout("ro-1", run_id="a")])
        asked: tuple[list[str] | None, ...] = (None, [], ["a"], ["b"], ["b", "a"])
        assert [await store.await_work(runs) for runs in asked] == [True, False, True, False, True]
        first = await claim_one(store)
        assert [await store.await_work(runs) for runs in asked] == [False] * 5
        await store.report([make_report(first, AttemptStatus.LOST)])
        assert [await store.await_work(runs) for runs in asked] == [True, False, True, False, True]

    async def test_who_waits_for_work_is_woken_by_it(self, store: Store) -> None:
        waiting = [
            asyncio.create_task(store.await_work(runs, timeout_s=60.0)) for runs in (None, ["a"])
        ]
        other = asyncio.create_task(store.await_work(["b"], timeout_s=60.0))
        await store.enqueue([make_rollout("ro-1", run_id="a")])
        assert await asyncio.gather(*waiting) == [True, True]
        assert not other.done()
        await store.enqueue([make_rollout("ro-2", run_id="b")])
        assert await other

    async def test_a_rollout_that_is_to_be_run_alone_is_work(self, store: Store) -> None:
        await store.enqueue([make_rollout("ro-1")])
        report = make_report(await claim_one(store), AttemptStatus.LOST)
        await store.report([msgspec.structs.replace(report, alone=True)])
        assert await store.await_work()
