"""Run the store suite with MemoryStore."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

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
