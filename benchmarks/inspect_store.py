"""Cost of reading a large store: `Store.summaries`, `Store.search` and `lightspan inspect`.

    python benchmarks/inspect_store.py [--rollouts 100000] [--folder FOLDER] [--json PATH]

Makes a run with a store of many rollouts through the public API: ten spans of each rollout, two of
them model calls with a token record each. Then each read runs in a process of its own, which
reports its CPU seconds and its peak memory. `--folder` keeps the run there, and uses the run that
is already there.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from _report import Figure, finish

from lightspan.schema import semconv as c
from lightspan.schema.records import (
    Attempt,
    AttemptRef,
    AttemptStatus,
    Claim,
    Mode,
    Outcome,
    Rollout,
)
from lightspan.schema.reward import Reward
from lightspan.schema.spans import Span, SpanKind, new_span_id, new_trace_id
from lightspan.schema.token_records import TokenRecord
from lightspan.stores import open_store
from lightspan.stores.protocol import Store, StoredCall
from lightspan.training.folder import RunFolder

RUN: Final = "large"
STEP_SIZE: Final = 512
GROUP_SIZE: Final = 8
BATCH: Final = 512
CALLS: Final = 2
OTHERS: Final = 8
"""Spans of a rollout that are no model calls."""
TASK: Final = "How many customers of the northern region ordered twice in March? " * 4
ANSWER: Final = "SELECT count(*) FROM customers JOIN orders USING (customer_id) WHERE region = " * 3
MiB: Final = 2**20


def _span(attempt: Attempt, kind: SpanKind, name: str, start_s: float, **attributes: Any) -> Span:
    return Span(
        span_id=new_span_id(),
        trace_id=new_trace_id(),
        name=name,
        kind=kind,
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        start_ns=int(start_s * 1e9),
        end_ns=int(start_s * 1e9) + 40_000_000,
        attributes=attributes,
    )


def _call(attempt: Attempt, number: int) -> StoredCall:
    call_id = f"call-{attempt.attempt_id.removeprefix('at-')}-{number}"
    agent = ("writer", "critic")[number % 2]
    messages = json.dumps([{"role": "user", "parts": [{"type": "text", "content": TASK}]}])
    answers = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": ANSWER}]}])
    span = _span(
        attempt,
        SpanKind.LLM,
        "chat",
        attempt.started_at + number,
        **{
            c.CALL_ID: call_id,
            c.RESPONSE_ID: f"chatcmpl-{call_id}",
            c.AGENT_PATH: agent,
            c.INPUT_MESSAGES: messages,
            c.OUTPUT_MESSAGES: answers,
        },
    )
    record = TokenRecord.create(
        attempt_id=attempt.attempt_id,
        call_id=call_id,
        choice=0,
        policy="policy",
        prompt_ids=range(96),
        response_ids=range(32),
        logprobs=[-0.25] * 32,
        versions=[(1, 32)],
        agent_path=agent,
        span_id=span.span_id,
        sequence_start=2 * number,
        sequence_end=2 * number + 1,
    )
    return StoredCall(span=span, records=[record], epoch=attempt.epoch)


async def _record(store: Store, claims: Sequence[Claim]) -> None:
    attempts = [claim.attempt for claim in claims]
    await store.add_calls([_call(attempt, n) for attempt in attempts for n in range(CALLS)])
    # together, so that the store commits them in one transaction
    await asyncio.gather(*(_record_tools(store, attempt) for attempt in attempts))
    reports = [
        attempt.report(AttemptStatus.SUCCEEDED, Outcome.OK, reward=Reward(number % 5 / 4))
        for number, attempt in enumerate(attempts)
    ]
    await store.report(reports)


async def _record_tools(store: Store, attempt: Attempt) -> None:
    spans = [
        _span(attempt, SpanKind.TOOL, f"tool {n}", attempt.started_at + n, result="42 rows")
        for n in range(OTHERS)
    ]
    await store.add_spans(AttemptRef(attempt.attempt_id, attempt.epoch), spans)


async def _fill(store: Store, total: int) -> None:
    for start in range(0, total, BATCH):
        numbers = range(start, min(start + BATCH, total))
        rollouts = [
            Rollout(
                rollout_id=f"{RUN}-{n // STEP_SIZE:06d}-{n % STEP_SIZE:03d}",
                task={"id": f"task-{n // GROUP_SIZE % 1000}", "question": TASK},
                task_id=f"task-{n // GROUP_SIZE % 1000}",
                run_id=RUN,
                group_id=f"group-{n // GROUP_SIZE}",
                mode=Mode.TRAIN,
                step=n // STEP_SIZE,
            )
            for n in numbers
        ]
        await store.enqueue(rollouts)
        await _record(store, await store.claim("runner", len(rollouts), 3600.0, RUN))


async def fill(url: str, total: int) -> None:
    """Fill the empty store of a URL with `total` rollouts."""
    async with open_store(url) as store:
        await _fill(store, total)


def make_run(folder: Path, total: int) -> None:
    """Make a run folder with a store of `total` rollouts."""
    run = RunFolder(folder)
    run.create()
    run.write_config(
        {"algorithm": "LightningRL", "app": "app:answer", "run_id": RUN, "model": "small"}
    )

    asyncio.run(fill(run.store_url, total))
    for step in range(-(-total // STEP_SIZE)):
        run.add_metrics({"kind": "train", "step": step, "rollouts": STEP_SIZE, "reward": 0.5})
    run.release()


# --- what is measured, each in a process of its own ---------------------------------------------
async def _summaries(folder: Path) -> int:
    async with open_store(RunFolder(folder).store_url) as store:
        return len((await store.summaries(RUN)).rows)


async def _page(folder: Path) -> int:
    async with open_store(RunFolder(folder).store_url) as store:
        return len((await store.summaries(RUN, newest=True, limit=50)).rows)


async def _miss(folder: Path) -> int:
    async with open_store(RunFolder(folder).store_url) as store:
        return len(await store.search("a text that no span has"))


async def _hit(folder: Path) -> int:
    async with open_store(RunFolder(folder).store_url) as store:
        return len(await store.search("northern region"))


def _inspect(folder: Path) -> int:
    from lightspan_tools.inspect import inspect_run

    return len(inspect_run(folder).splitlines())


READS: Final = {
    "nothing": lambda folder: 0,
    "summaries": lambda folder: asyncio.run(_summaries(folder)),
    "page": lambda folder: asyncio.run(_page(folder)),
    "miss": lambda folder: asyncio.run(_miss(folder)),
    "hit": lambda folder: asyncio.run(_hit(folder)),
    "inspect": _inspect,
}


def _read(name: str, folder: Path) -> None:
    """Run a read in this process, and print what it returned and used as JSON."""
    from lightspan_tools import inspect  # noqa: F401 - imports are no part of a read

    cpu, wall = time.process_time(), time.perf_counter()
    result = READS[name](folder)
    used = {
        "result": result,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MiB,
    }
    print(json.dumps(used))


def measure(name: str, folder: Path) -> dict[str, float]:
    """Run a read in a new process; return its result, seconds and peak memory."""
    command = [sys.executable, __file__, "--read", name, "--folder", str(folder)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used: dict[str, float] = json.loads(output)
    print(f"{name}: {used['result']} rows or lines, {used['wall_s']:.2f} s of wall time")
    return used


def figures_of(folder: Path) -> list[Figure]:
    """Measure all reads on the run in `folder`."""
    targets = {"summaries": 1.5, "miss": 1.5, "inspect": 3.0}
    figures = []
    for name in READS:
        used = measure(name, folder)
        figures.append(
            Figure(what=name, unit="CPU-s", ours=used["cpu_s"], at_most=targets.get(name))
        )
        limit = 300.0 if name == "inspect" else None
        figures.append(
            Figure(what=f"{name}, peak", unit="MiB", ours=used["peak_mib"], at_most=limit)
        )
    return figures


def _options() -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="folder of the run; kept")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", choices=READS, help="only this read, in this process")
    return parser.parse_args()


def main() -> int:
    options = _options()
    if options.read:
        _read(options.read, options.folder)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "run"
        if not RunFolder(folder).is_used:
            make_run(folder, options.rollouts)
        return finish(figures_of(folder), options.json)


if __name__ == "__main__":
    sys.exit(main())
