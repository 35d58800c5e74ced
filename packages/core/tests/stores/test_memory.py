"""MemoryStore in the suite of stores."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightspan.errors import StoreError
from lightspan.schema.records import RolloutStatus
from lightspan.stores.memory import MemoryStore
from lightspan_testing.store_suite import LEASE_S, Clock, StoreSuite, make_report, make_rollout


class TestMemoryStore(StoreSuite):
    def make_store(self, name: str, clock: Clock) -> MemoryStore:
        return MemoryStore(clock=clock)


def test_threads_with_event_loops_of_their_own() -> None:
    store = MemoryStore()
    asyncio.run(store.open())
    asyncio.run(store.enqueue([make_rollout(f"ro-{i}") for i in range(200)]))

    async def drain() -> int:
        done = 0
        while claims := await store.claim("runner", 3, LEASE_S):
            done += sum(await store.report([make_report(claim.attempt) for claim in claims]))
        return done

    with ThreadPoolExecutor(4) as threads:
        counts = list(threads.map(lambda _: asyncio.run(drain()), range(4)))
    assert sum(counts) == 200
    assert asyncio.run(store.count()) == {RolloutStatus.SUCCEEDED: 200}


async def test_a_batch_that_memory_has_no_room_for_changes_nothing() -> None:
    """SQLite fails in the middle of the batch's inserts."""
    async with MemoryStore() as store:
        await store.enqueue([make_rollout("ro-first")])
        [(pages,)] = store._db.execute("PRAGMA page_count").fetchall()
        store._db.execute(f"PRAGMA max_page_count = {pages + 8}")
        with pytest.raises(StoreError, match="refused a write: database or disk is full"):
            await store.enqueue([make_rollout(f"ro-{i}", task="x" * 2_000) for i in range(100)])
        assert [state.rollout.rollout_id for state in await store.rollouts()] == ["ro-first"]
        store._db.execute("PRAGMA max_page_count = 100000")
        await store.enqueue([make_rollout("ro-next")])
        assert await store.count() == {RolloutStatus.QUEUED: 2}
