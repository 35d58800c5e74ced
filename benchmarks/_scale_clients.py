"""Processes that only send requests to a served store, as `peer_scale.py` does with the peer's.

Rollouts are enqueued, claimed and reported in batches; model calls are added in batches too.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from store import make_call, make_rollouts

from lightspan.schema.records import Attempt, AttemptStatus, Report, new_id
from lightspan.schema.reward import Reward
from lightspan.stores import open_store
from lightspan.stores.protocol import Store

BATCH: Final = 25
"""Number of rollouts or calls in a batch, the same as in the peer's clients."""


async def rollouts(store: Store, number: int) -> None:
    """Take `number` rollouts from enqueued to succeeded, as one client."""
    name = new_id("client")
    for _ in range(0, number, BATCH):
        await store.enqueue(make_rollouts(BATCH))
        claims = await store.claim(name, BATCH, 60.0)
        await store.report([_success(claim.attempt) for claim in claims])


async def spans(store: Store, number: int) -> None:
    """Add `number` LLM spans with their token records to one attempt."""
    await store.enqueue(make_rollouts(1))
    [claim] = await store.claim(new_id("client"), 1, 60.0)
    for start in range(0, number, BATCH):
        calls = [make_call(claim.attempt, start + index) for index in range(BATCH)]
        await store.add_calls(calls)


WORK: Final[dict[str, Callable[[Store, int], Awaitable[None]]]] = {
    "rollouts": rollouts,
    "spans": spans,
}


def measure_clients(name: str, url: str, processes: int, number: int) -> float:
    """Return how many rollouts or spans per second all processes together complete.

    The time starts when all processes are connected.
    """
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(processes + 1)
    each = max(BATCH, number // processes // BATCH * BATCH)
    children = [
        spawn.Process(target=_ask, args=(url, name, each, barrier), daemon=True)
        for _ in range(processes)
    ]
    for child in children:
        child.start()
    barrier.wait()
    begun = time.perf_counter()
    barrier.wait()
    wall_s = time.perf_counter() - begun
    for child in children:
        child.join()
    return each * processes / wall_s


def _ask(url: str, name: str, number: int, barrier: Any) -> None:
    async def run() -> None:
        async with open_store(url) as store:
            await WORK[name](store, BATCH)
            await asyncio.to_thread(barrier.wait)
            await WORK[name](store, number)
            await asyncio.to_thread(barrier.wait)

    asyncio.run(run())


def _success(attempt: Attempt) -> Report:
    return Report(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        status=AttemptStatus.SUCCEEDED,
        reward=Reward(1.0),
    )
