"""agentlightning 0.3.0's in-memory store, measured as `store.py` measures ours.

Runs in the peer's own environment (`_peers.py`); the last line is JSON: per measure how many a
CPU-second and how many a wall second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agentlightning import InMemoryLightningStore, Span
from agentlightning.types import EnqueueRolloutRequest

BATCH = 100
CLIENTS = 64
IDS, LOGPROBS, TEXT = 640, 128, 2500

Clock = tuple[float, float]


def make_span(rollout_id: str, attempt_id: str, number: int) -> Any:
    """Return a model call as the peer's tracers record it: all data are attributes of one span."""
    return Span.from_attributes(
        name="openai.chat.completion",
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=number,
        start_time=1.0,
        end_time=2.0,
        attributes={
            "gen_ai.prompt.0.content": "x" * (TEXT - 500),
            "gen_ai.completion.0.content": "y" * 500,
            "prompt_token_ids": list(range(IDS - LOGPROBS)),
            "response_token_ids": list(range(LOGPROBS)),
            "logprobs": [-0.5] * LOGPROBS,
        },
    )


def clock() -> Clock:
    return time.process_time(), time.perf_counter()


def since(begin: Clock) -> Clock:
    cpu, wall = clock()
    return cpu - begin[0], wall - begin[1]


async def calls(store: Any, number: int) -> Clock:
    """Measure `add_many_spans` in batches, over 16 attempts."""
    started = []
    for index in range(16):
        await store.enqueue_rollout(input={"question": index})
        started.append(await store.dequeue_rollout())
    spans = [
        make_span(one.rollout_id, one.attempt.attempt_id, index)
        for index in range(number)
        for one in [started[index % 16]]
    ]
    begin = clock()
    for start in range(0, number, BATCH):
        await store.add_many_spans(spans[start : start + BATCH])
    return since(begin)


async def one_by_one(store: Any, number: int) -> Clock:
    """Measure rollouts by one client, which waits for each operation."""
    begin = clock()
    for index in range(number):
        await _one(store, index)
    return since(begin)


async def many_clients(store: Any, number: int) -> Clock:
    """Measure rollouts by many concurrent clients, each of which waits for each operation."""
    numbers = iter(range(number))

    async def work() -> None:
        for index in numbers:
            await _one(store, index)

    begin = clock()
    await asyncio.gather(*(work() for _ in range(CLIENTS)))
    return since(begin)


async def _one(store: Any, index: int) -> None:
    await store.enqueue_rollout(input={"question": index})
    claimed = await store.dequeue_rollout()
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")


async def batches(store: Any, number: int) -> Clock:
    """Measure rollouts in batches; reports have no batches in this store."""
    begin = clock()
    for start in range(0, number, BATCH):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input={"question": start + i}) for i in range(BATCH)]
        )
        for claimed in await store.dequeue_many_rollouts(limit=BATCH):
            attempt_id = claimed.attempt.attempt_id
            await store.update_attempt(claimed.rollout_id, attempt_id, status="succeeded")
    return since(begin)


MEASURES: dict[str, tuple[Callable[[Any, int], Awaitable[Clock]], int]] = {
    "model calls, batches of 100": (calls, 5_000),
    "rollouts, one client one by one": (one_by_one, 5_000),
    "rollouts, 64 clients one by one": (many_clients, 5_000),
    "rollouts, batches of 100": (batches, 5_000),
}


def main() -> None:
    """Run all measurements and print the rates."""
    parser = argparse.ArgumentParser(description="agentlightning's in-memory store.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    quick = parser.parse_args().quick
    logging.disable(logging.WARNING)
    rates = {}
    for name, (measure, number) in MEASURES.items():
        number = number // 10 if quick else number
        cpu, wall = asyncio.run(measure(InMemoryLightningStore(), number))
        rates[name] = {"per_cpu_s": number / cpu, "per_s": number / wall}
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
