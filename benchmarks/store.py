"""How fast the stores are: model calls, spans and rollouts per CPU-second of this process.

    python benchmarks/store.py [--quick] [--peer-python PATH]

A model call is an LLM span with 2.5 kB of text and a token record of 640 prompt and response ids
and 128 log-probabilities, written in batches of 100. A rollout is enqueued, claimed and reported.
`--peer-python` names an interpreter that has agentlightning 0.3.0: its in-memory store is to be
measured in the same run, for ratios. A peer that cannot be measured is an error, never a blank.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from lightspan.conventions import CALL_ID, INPUT_MESSAGES, OUTPUT_MESSAGES
from lightspan.records import (
    Attempt,
    AttemptRef,
    AttemptStatus,
    Report,
    Reward,
    Rollout,
    TokenRecord,
    new_id,
)
from lightspan.spans import Span, SpanKind, new_span_id, new_trace_id
from lightspan.store import Store, StoredCall
from lightspan.stores import open_store

BATCH = 100
IDS, LOGPROBS, TEXT = 640, 128, 2500

Measure = Callable[[Store, int], Awaitable[int]]


def make_call(attempt: Attempt, number: int) -> StoredCall:
    """A model call as the gateway writes it."""
    call_id = f"call-{number}"
    span = Span(
        span_id=new_span_id(),
        trace_id=new_trace_id(),
        name="chat",
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        kind=SpanKind.LLM,
        attributes={
            CALL_ID: call_id,
            INPUT_MESSAGES: "x" * (TEXT - 500),
            OUTPUT_MESSAGES: "y" * 500,
        },
        sequence_start=2 * number,
        sequence_end=2 * number + 1,
    )
    record = TokenRecord.create(
        attempt_id=attempt.attempt_id,
        call_id=call_id,
        choice=0,
        policy="main",
        prompt_ids=range(IDS - LOGPROBS),
        response_ids=range(LOGPROBS),
        logprobs=[-0.5] * LOGPROBS,
        versions=[(1, LOGPROBS)],
        sequence_start=2 * number,
    )
    return StoredCall(span=span, records=[record], epoch=attempt.epoch)


async def _start(store: Store, number: int) -> list[Attempt]:
    run = new_id("run")
    await store.enqueue(
        [Rollout(rollout_id=new_id("ro"), task={}, task_id="t", run_id=run) for _ in range(number)]
    )
    return [claim.attempt for claim in await store.claim("bench", number, 3600.0, run)]


async def measure_calls(store: Store, number: int) -> int:
    """add_calls in batches, over 16 attempts."""
    attempts = await _start(store, 16)
    calls = [make_call(attempts[i % 16], i) for i in range(number)]
    begin = time.process_time_ns()
    for start in range(0, number, BATCH):
        await store.add_calls(calls[start : start + BATCH])
    return time.process_time_ns() - begin


async def measure_single_calls(store: Store, number: int) -> int:
    """add_calls one by one, 32 of them in flight, as a gateway writes."""
    attempts = await _start(store, 16)
    calls = iter([make_call(attempts[i % 16], i) for i in range(number)])

    async def write() -> None:
        for call in calls:
            await store.add_calls([call])

    begin = time.process_time_ns()
    await asyncio.gather(*(write() for _ in range(32)))
    return time.process_time_ns() - begin


async def measure_spans(store: Store, number: int) -> int:
    """add_spans in batches: the LLM spans alone."""
    [attempt] = await _start(store, 1)
    spans = [make_call(attempt, i).span for i in range(number)]
    ref = AttemptRef(attempt.attempt_id, attempt.epoch)
    begin = time.process_time_ns()
    for start in range(0, number, BATCH):
        await store.add_spans(ref, spans[start : start + BATCH])
    return time.process_time_ns() - begin


async def measure_rollouts(store: Store, number: int) -> int:
    """enqueue, claim and report in batches."""
    return await _rollouts(store, number, BATCH)


async def measure_single_rollouts(store: Store, number: int) -> int:
    """enqueue, claim and report, one rollout at a time."""
    return await _rollouts(store, number, 1)


async def _rollouts(store: Store, number: int, batch: int) -> int:
    rollouts = [
        Rollout(rollout_id=new_id("ro"), task={"question": i}, task_id="t") for i in range(number)
    ]
    begin = time.process_time_ns()
    for start in range(0, number, batch):
        await store.enqueue(rollouts[start : start + batch])
        claims = await store.claim("bench", batch, 60.0)
        await store.report([_success(claim.attempt) for claim in claims])
    return time.process_time_ns() - begin


def _success(attempt: Attempt) -> Report:
    return Report(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        status=AttemptStatus.SUCCEEDED,
        reward=Reward(1.0),
    )


MEASURES: dict[str, tuple[Measure, int]] = {
    "model calls, batches of 100": (measure_calls, 10_000),
    "model calls, 32 in flight": (measure_single_calls, 5_000),
    "LLM spans, batches of 100": (measure_spans, 10_000),
    "rollouts, batches of 100": (measure_rollouts, 10_000),
    "rollouts, one by one": (measure_single_rollouts, 3_000),
}
REPEATS = 3


async def measure_store(url: str, quick: bool) -> dict[str, float]:
    """Per measure, the median number per CPU-second."""
    rates: dict[str, float] = {}
    for name, (measure, number) in MEASURES.items():
        number = number // 10 if quick else number
        times = []
        for repeat in range(REPEATS):
            async with open_store(url.format(f"{len(rates)}-{repeat}")) as store:
                times.append(await measure(store, number))
        rates[name] = number / (sorted(times)[REPEATS // 2] / 1e9)
    return rates


def measure_peer(python: str) -> dict[str, float]:
    """agentlightning's in-memory store, by the same measures, in its own interpreter."""
    raise SystemExit(
        f"--peer-python {python}: the comparison with agentlightning 0.3.0 is not written yet"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--peer-python", help="an interpreter with agentlightning 0.3.0")
    options = parser.parse_args()
    peer = measure_peer(options.peer_python) if options.peer_python else None
    with tempfile.TemporaryDirectory() as folder:
        columns = {
            "memory": asyncio.run(measure_store("memory:", options.quick)),
            "SQLite": asyncio.run(measure_store(f"{Path(folder)}/{{}}.db", options.quick)),
        }
    print_table(columns, peer)


def print_table(columns: dict[str, dict[str, float]], peer: dict[str, float] | None) -> None:
    """Rates, and with a peer the ratios to it."""
    print(f"{'per CPU-second':30}" + "".join(f"{name:>20}" for name in columns))
    for measure in MEASURES:
        cells = (_cell(rates[measure], (peer or {}).get(measure)) for rates in columns.values())
        print(f"{measure:30}" + "".join(f"{cell:>20}" for cell in cells))


def _cell(rate: float, peer: float | None) -> str:
    return f"{rate:,.0f}" + (f" ({rate / peer:.1f}x)" if peer else "")


if __name__ == "__main__":
    main()
