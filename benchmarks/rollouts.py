"""Rollouts per second, from enqueued to done, compared with agentlightning 0.3.0.

    python benchmarks/rollouts.py [--rollouts 1000] [--rounds 3] [--json PATH]

Ours: `LocalRunners` as the trainer starts them (8 slots a process), a SQLite store on disk, and the
trainer's way of waiting. The peer: its store server in a process of its own and its runner
processes, one rollout at a time each, as it works.

- 8 emitted LLM spans: the app writes 8 model calls of 2.5 kB of text, 640 token ids and 128
  log-probabilities, one at a time, each acknowledged by the store under the attempt's epoch, as the
  gateway writes them; and returns a reward. The peer's agent emits 8 spans with the same in their
  attributes through its tracer, and returns a reward. Every call is checked to be there.
- 8 gateway calls: the app asks the real gateway (in the measuring process, its engine has every
  token ready) for 64 tokens through the OpenAI client. There is no peer for this. Most of the CPU
  time is the client's, so that of the app's thread, shim included, is listed separately.

Wall time is measured in the steady state, when the processes have started and run a first batch;
the start is reported separately. Ours and the peer take turns in several rounds, of which the best
counts.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import psutil
from _gateway_server import ReadyEngine
from _peers import HERE, run_peer
from _report import Figure, finish, options_of
from _rollout_apps import CALLS
from store import LOGPROBS

from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import Mode, Rollout, RolloutStatus, new_id
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import SpanKind
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_gateway import Gateway

PEER: Final = "agentlightning-0.3.0"
PROCESSES: Final = (1, 2)
SLOTS: Final = 8
"""Number of concurrent attempts in each process."""
AT_LEAST: Final = 10.0
SHARE: Final = 10
"""The peer runs this many times fewer rollouts, because it is slower."""


@dataclass(frozen=True)
class Run:
    """The result of one batch in the steady state."""

    per_s: float
    """Rollouts per second of wall time."""
    start_s: float
    """Seconds until the processes had started and worked."""
    runners_ms: float
    """CPU milliseconds of the runner processes per rollout."""
    here_ms: float
    """CPU milliseconds of this process per rollout: waiting, and the gateway if there is one."""
    client_ms: float = 0.0
    """Part of `runners_ms` that the app's own thread used; 0 if the app does not report it."""


async def measure_records(processes: int, number: int) -> Run:
    """Measure rollouts whose app writes 8 calls to the store."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_store(f"sqlite:///{folder}/run.db") as store:
            return await _measure(store, "_rollout_apps:records", processes, number, "")


async def measure_gateway(processes: int, number: int) -> Run:
    """Measure rollouts whose app makes 8 calls to the gateway."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            open_store(f"sqlite:///{folder}/run.db") as store,
            Gateway(store, ReadyEngine()) as gateway,
        ):
            rule = Rule("writer", Target(route=Route.POLICY, policy="policy"))
            routing = Routing(gateway_url=gateway.url, rules=[rule])
            resources_id = await store.put_resources({"routing": routing})
            return await _measure(store, "_rollout_apps:asks", processes, number, resources_id)


async def _measure(store: Store, app: str, processes: int, number: int, resources_id: str) -> Run:
    run_id = new_id("run")
    begun = time.perf_counter()
    async with working(store, app, processes, run_id) as runners:
        await run_batch(store, run_id, resources_id, 2 * SLOTS * processes)
        started = time.perf_counter()
        runners_s, here_s = cpu_s(runners.pids), time.process_time()
        ids = await run_batch(store, run_id, resources_id, number)
        wall_s = time.perf_counter() - started
        runners_s, here_s = cpu_s(runners.pids) - runners_s, time.process_time() - here_s
    client_ms = await check_calls(store, ids)
    return Run(
        per_s=number / wall_s,
        start_s=started - begun,
        runners_ms=1000 * runners_s / number,
        here_ms=1000 * here_s / number,
        client_ms=client_ms,
    )


@asynccontextmanager
async def working(
    store: Store, app: str, processes: int, run_id: str
) -> AsyncIterator[LocalRunners]:
    runners = LocalRunners(SLOTS * processes, processes=processes)
    await runners.start(
        RunnerPlan(store_url=store.url, app=app, run_id=run_id, sys_path=[str(HERE)])
    )
    try:
        yield runners
    finally:
        await runners.stop()


async def run_batch(store: Store, run_id: str, resources_id: str, number: int) -> list[str]:
    """Enqueue rollouts, wait for their end as the trainer does, and return their ids."""
    rollouts = [
        Rollout(
            rollout_id=new_id("ro"),
            task={"question": index, "store": store.url},
            task_id=str(index),
            run_id=run_id,
            resources_id=resources_id,
            mode=Mode.TRAIN,
        )
        for index in range(number)
    ]
    ids = [rollout.rollout_id for rollout in rollouts]
    cursor = (await store.watch(run_id=run_id)).cursor
    await store.enqueue(rollouts)
    open_ids = set(ids)
    while open_ids:
        changes = await store.watch(cursor, run_id=run_id, timeout_s=1.0)
        cursor = changes.cursor
        open_ids -= {state.rollout.rollout_id for state in changes.rollouts if state.status.final}
    return ids


async def check_calls(store: Store, rollout_ids: Sequence[str]) -> float:
    """Check that all calls are stored; return the mean CPU milliseconds that the apps reported.

    Raises:
        SystemExit: a call, a token record or a rollout is missing.
    """
    states = await store.rollouts(rollout_ids)
    attempts = await store.attempts(rollout_ids)
    ids = [attempt.attempt_id for attempt in attempts]
    spans, records = await store.spans(ids), await store.token_records(ids)
    for attempt in attempts:
        calls = [s for s in spans[attempt.attempt_id] if s.kind is SpanKind.LLM and not s.late]
        kept = [r for r in records[attempt.attempt_id] if len(r.logprob_data) and not r.late]
        if (len(calls), len(kept), attempt.capture_errors) != (CALLS, CALLS, []):
            raise SystemExit(
                f"{attempt.attempt_id}: {len(calls)} spans and {len(kept)} token records of "
                f"{CALLS}, {attempt.message} {attempt.capture_errors}"
            )
    done = [state for state in states if state.status is RolloutStatus.SUCCEEDED]
    if not len(attempts) == len(done) == len(rollout_ids):
        raise SystemExit(f"{len(done)} of {len(rollout_ids)} rollouts succeeded")
    said = [a.reward.dimensions.get("cpu_ms", 0.0) for a in attempts if a.reward is not None]
    return sum(said) / len(said)


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU seconds of processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(one.user + one.system for one in times))


def measure_peer(processes: int, number: int) -> Any:
    """Return the peer's rollouts per second and its start-up time."""
    options = ("--processes", str(processes), "--rollouts", str(number))
    return run_peer(PEER, "peer_rollouts.py", *options)


def measure(processes: int, number: int, rounds: int) -> list[Figure]:
    """Return the figures for a number of runner processes."""
    ours, gateway, peers = [], [], []
    for _ in range(rounds):
        peers.append(measure_peer(processes, max(20, number // SHARE)))
        ours.append(asyncio.run(measure_records(processes, number)))
        gateway.append(asyncio.run(measure_gateway(processes, max(20, number // 4))))
    peer = max(peers, key=lambda one: float(one["per_s"]))
    return _figures(
        f"{processes} runner process{'es' * (processes > 1)}",
        max(ours, key=lambda one: one.per_s),
        max(gateway, key=lambda one: one.per_s),
        peer,
    )


def _figures(where: str, ours: Run, gateway: Run, peer: Any) -> list[Figure]:
    own = gateway.runners_ms - gateway.client_ms
    return [
        Figure(
            what=f"{CALLS} emitted LLM spans with {LOGPROBS} log-probs, {where}",
            unit="rollouts/s",
            ours=ours.per_s,
            peer="0.3.0",
            theirs=peer["per_s"],
            more_is_better=True,
            at_least=AT_LEAST,
        ),
        Figure(what=f"  CPU of the runners, {where}", unit="ms a rollout", ours=ours.runners_ms),
        Figure(
            what=f"  until the processes work, {where}",
            unit="s",
            ours=ours.start_s,
            peer="0.3.0",
            theirs=peer["start_s"],
        ),
        Figure(what=f"{CALLS} gateway calls, {where}", unit="rollouts/s", ours=gateway.per_s),
        Figure(what=f"  CPU of the client, {where}", unit="ms a rollout", ours=gateway.client_ms),
        Figure(what=f"  CPU of the runners else, {where}", unit="ms a rollout", ours=own),
        Figure(
            what=f"  CPU of gateway and engine, {where}", unit="ms a rollout", ours=gateway.here_ms
        ),
    ]


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--rollouts", type=int, default=1000, help="of ours, in one batch")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures = [
        figure
        for processes in PROCESSES
        for figure in measure(processes, options.rollouts, options.rounds)
    ]
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
