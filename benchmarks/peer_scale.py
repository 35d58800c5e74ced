"""agentlightning 0.3.0's side of `scale.py`: its store's HTTP server, and processes that use it.

Each process does what is cheapest for the server: rollouts are enqueued and dequeued in batches,
and each is updated to succeeded; LLM spans, with token ids and log-probabilities in their
attributes, are added several at a time. No runner, tracer or agent takes part, which would cost
more (`peer_rollouts.py` measures these). Runs in the peer's environment; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # it runs without the folder of its own

from peer_rollouts import free_port, quiet, serve
from peer_store import make_span

BATCH = 25
TOGETHER = 4
"""Number of concurrent requests of one process that adds spans."""


async def rollouts(store: Any, number: int) -> None:
    """Take `number` rollouts from enqueued to succeeded."""
    from agentlightning.types import EnqueueRolloutRequest

    for start in range(0, number, BATCH):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input={"question": start + i}) for i in range(BATCH)]
        )
        claimed = await store.dequeue_many_rollouts(limit=BATCH)
        await asyncio.gather(*(_succeed(store, one) for one in claimed))


async def _succeed(store: Any, one: Any) -> None:
    await store.update_attempt(one.rollout_id, one.attempt.attempt_id, status="succeeded")


async def spans(store: Any, number: int) -> None:
    """Add `number` LLM spans to one attempt."""
    await store.enqueue_rollout(input={"question": 0})
    one = await store.dequeue_rollout()
    numbers = iter(range(number))

    async def add() -> None:
        for index in numbers:
            await store.add_span(make_span(one.rollout_id, one.attempt.attempt_id, index))

    await asyncio.gather(*(add() for _ in range(TOGETHER)))


WORK: dict[str, Callable[[Any, int], Awaitable[None]]] = {"rollouts": rollouts, "spans": spans}


def ask(url: str, name: str, number: int, barrier: Any) -> None:
    """Run one process: do some work to warm up, then the measured work together with the others."""
    from agentlightning.store.client_server import LightningStoreClient

    async def run() -> None:
        store = LightningStoreClient(url)
        await WORK[name](store, BATCH)
        await asyncio.to_thread(barrier.wait)
        await WORK[name](store, number)
        await asyncio.to_thread(barrier.wait)
        await store.close()

    quiet()
    asyncio.run(run())


def measure(name: str, url: str, processes: int, number: int) -> float:
    """Return how many rollouts or spans per second all processes together complete."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(processes + 1)
    each = max(BATCH, number // processes // BATCH * BATCH)
    children = [
        spawn.Process(target=ask, args=(url, name, each, barrier), daemon=True)
        for _ in range(processes)
    ]
    for child in children:
        child.start()
    barrier.wait()
    begun = time.perf_counter()
    barrier.wait()
    wall = time.perf_counter() - begun
    for child in children:
        child.join()
    return each * processes / wall


async def answers(url: str) -> None:
    """Wait until the server answers."""
    from agentlightning.store.client_server import LightningStoreClient

    store = LightningStoreClient(url)
    for _ in range(600):
        try:
            await store.add_resources({})
            break
        except Exception:
            await asyncio.sleep(0.1)
    await store.close()


def main() -> None:
    """Start the server, measure, and end the server."""
    parser = argparse.ArgumentParser(description="agentlightning's store over HTTP.")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--number", type=int, default=1000)
    options = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port,))
    server.start()
    try:
        asyncio.run(answers(url))
        found = {name: measure(name, url, options.processes, options.number) for name in WORK}
        print(json.dumps(found))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
