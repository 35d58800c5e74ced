"""How the cost of a rollout grows with the number of rollouts in a store (for `scale.py`).

A file is filled by the store's own operations. At certain sizes, some rollouts are measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from store import make_call, make_rollouts

from lightspan.schema.records import Attempt, AttemptStatus, Report
from lightspan.schema.reward import Reward
from lightspan.schema.spans import Span
from lightspan.schema.token_records import TokenRecord
from lightspan.stores import open_store
from lightspan.stores.protocol import Store, StoredCall

BATCH: Final = 100
WINDOW: Final = 2_000
"""Number of rollouts in one measurement."""
CALLS: Final = 2
"""Number of model calls of a measured rollout, each with 2.5 kB of text, 640 ids and 128
log-probabilities. Rollouts that only fill the store have one short call."""


@dataclass(frozen=True)
class Window:
    """One measurement of `WINDOW` rollouts."""

    stored: int
    """Number of rollouts in the store before the measurement."""
    cpu_ms: float
    """CPU milliseconds of this process per rollout: enqueued, claimed, its calls written,
    reported."""
    wall_ms: float
    file_mb: float


def fill(sizes: Sequence[int], path: Path, minutes: float) -> list[Window]:
    """Measure at each number of stored rollouts in `sizes`; stop early after `minutes`."""
    return asyncio.run(_fill(sizes, path, minutes))


async def _fill(sizes: Sequence[int], path: Path, minutes: float) -> list[Window]:
    windows: list[Window] = []
    deadline = time.monotonic() + 60 * minutes
    stored = 0
    async with open_store(f"sqlite:///{path}") as store:
        for size in sizes:
            while stored < size and time.monotonic() < deadline:
                await _batch(store, full=False)
                stored += BATCH
            if stored < size:
                break
            windows.append(await _window(store, stored, path))
            stored += WINDOW
            print(f"  {windows[-1]}", flush=True)
        found = sum((await store.count()).values())
    if found != stored:
        raise SystemExit(f"{found} rollouts are stored of {stored}")
    return windows


async def _window(store: Store, stored: int, path: Path) -> Window:
    cpu_s, begun = time.process_time(), time.perf_counter()
    for _ in range(WINDOW // BATCH):
        await _batch(store, full=True)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - begun
    return Window(
        stored, 1000 * cpu_s / WINDOW, 1000 * wall_s / WINDOW, path.stat().st_size / 2**20
    )


async def _batch(store: Store, *, full: bool) -> None:
    """Take a batch of rollouts from enqueued to succeeded; if `full`, with calls of full size."""
    await store.enqueue(make_rollouts(BATCH))
    attempts = [claim.attempt for claim in await store.claim("bench", BATCH, 3600.0)]
    make, number = (make_call, CALLS) if full else (_short_call, 1)
    await store.add_calls([make(one, index) for one in attempts for index in range(number)])
    in_force = await store.report([_success(one) for one in attempts])
    assert in_force == [True] * BATCH


def _short_call(attempt: Attempt, number: int) -> StoredCall:
    """Return a model call of a few tokens."""
    call = make_call(attempt, number)
    [record] = call.records
    few = TokenRecord.create(
        attempt_id=record.attempt_id,
        call_id=record.call_id,
        choice=0,
        policy="main",
        prompt_ids=range(8),
        response_ids=range(8),
        logprobs=[-0.5] * 8,
        versions=[(1, 8)],
        sequence_start=record.sequence_start,
    )
    return msgspec.structs.replace(call, records=[few], span=_short_span(call))


def _short_span(call: StoredCall) -> Span:
    attributes = {name: str(value)[:20] for name, value in call.span.attributes.items()}
    return msgspec.structs.replace(call.span, attributes=attributes)


def _success(attempt: Attempt) -> Report:
    return Report(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        status=AttemptStatus.SUCCEEDED,
        reward=Reward(1.0),
    )
