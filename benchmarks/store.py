"""Speed of the stores, compared with agentlightning 0.3.0's in-memory store in the same run.

    python benchmarks/store.py [--quick] [--databases] [--json PATH]

The rates are per CPU-second of this process (in the last column per wall second):

- model calls: an LLM span with 2.5 kB of text and a token record of 640 prompt and response ids and
  128 log-probabilities; the peer keeps the same in one span's attributes;
- rollouts, from enqueued to done: enqueue, claim, report. By one client that awaits each of the
  three; by 64 such clients at once; and in batches of 100, as the trainer and its runners do it
  (the peer has batches of the first two).

SQLite is on disk, each write acknowledged once it survives `kill -9`; the peer's store forgets.
If PostgreSQL is installed, this run starts a server on the same disk, with fsync, and uses it over
a socket. It is compared with SQLite that flushes each transaction too (`?power_loss=true`), per
wall second, because most of PostgreSQL's work is done in other processes. Its transactions are
timed from when they have the lock of state changes to the answer of the commit. `--databases`
measures these two alone.
The peer's environment is made by `_peers.py`. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from _peers import run_peer
from _report import Figure, finish, options_of

from lightspan.schema.records import Attempt, AttemptRef, AttemptStatus, Report, Rollout, new_id
from lightspan.schema.reward import Reward
from lightspan.schema.semconv import CALL_ID, INPUT_MESSAGES, OUTPUT_MESSAGES
from lightspan.schema.spans import Span, SpanKind, new_span_id, new_trace_id
from lightspan.schema.token_records import TokenRecord
from lightspan.stores import open_store
from lightspan.stores.protocol import Store, StoredCall

PEER = "agentlightning-0.3.0"
BATCH = 100
CLIENTS = 64
IDS, LOGPROBS, TEXT = 640, 128, 2500


class Spent(NamedTuple):
    """CPU and wall seconds that a measurement took."""

    cpu: float
    wall: float


class Rate(NamedTuple):
    """Operations per CPU second and per wall second."""

    per_cpu_s: float
    per_s: float


class Clock:
    """Measures CPU and wall time from its creation."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def spent(self) -> Spent:
        return Spent(time.process_time() - self._cpu, time.perf_counter() - self._wall)


Measure = Callable[[Store, int], Awaitable[Spent]]


def make_call(attempt: Attempt, number: int) -> StoredCall:
    """Return a model call as the gateway writes it."""
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


async def measure_calls(store: Store, number: int) -> Spent:
    """Measure `add_calls` in batches, over 16 attempts."""
    attempts = await _start(store, 16)
    calls = [make_call(attempts[i % 16], i) for i in range(number)]
    clock = Clock()
    for start in range(0, number, BATCH):
        await store.add_calls(calls[start : start + BATCH])
    return clock.spent()


async def measure_single_calls(store: Store, number: int) -> Spent:
    """Measure `add_calls` with single calls, 32 at a time, as a gateway writes them."""
    attempts = await _start(store, 16)
    calls = iter([make_call(attempts[i % 16], i) for i in range(number)])

    async def write() -> None:
        for call in calls:
            await store.add_calls([call])

    clock = Clock()
    await asyncio.gather(*(write() for _ in range(32)))
    return clock.spent()


async def measure_spans(store: Store, number: int) -> Spent:
    """Measure `add_spans` in batches, with LLM spans but no token records."""
    [attempt] = await _start(store, 1)
    spans = [make_call(attempt, i).span for i in range(number)]
    ref = AttemptRef(attempt.attempt_id, attempt.epoch)
    clock = Clock()
    for start in range(0, number, BATCH):
        await store.add_spans(ref, spans[start : start + BATCH])
    return clock.spent()


async def measure_batches(store: Store, number: int) -> Spent:
    """Measure enqueue, claim and report in batches."""
    rollouts = make_rollouts(number)
    clock = Clock()
    for start in range(0, number, BATCH):
        await store.enqueue(rollouts[start : start + BATCH])
        claims = await store.claim("bench", BATCH, 60.0)
        await store.report([_success(claim.attempt) for claim in claims])
    return clock.spent()


async def measure_one_client(store: Store, number: int) -> Spent:
    """Measure enqueue, claim and report by one client, one rollout after the other."""
    return await _clients(store, number, 1)


async def measure_many_clients(store: Store, number: int) -> Spent:
    """Measure enqueue, claim and report by many concurrent clients."""
    return await _clients(store, number, CLIENTS)


async def _clients(store: Store, number: int, clients: int) -> Spent:
    rollouts = iter(make_rollouts(number))

    async def work() -> None:
        for rollout in rollouts:
            await store.enqueue([rollout])
            [claim] = await store.claim("bench", 1, 60.0)
            await store.report([_success(claim.attempt)])

    clock = Clock()
    await asyncio.gather(*(work() for _ in range(clients)))
    return clock.spent()


def make_rollouts(number: int) -> list[Rollout]:
    return [
        Rollout(rollout_id=new_id("ro"), task={"question": i}, task_id="t") for i in range(number)
    ]


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
    "LLM spans alone, batches of 100": (measure_spans, 10_000),
    "rollouts, one client one by one": (measure_one_client, 5_000),
    "rollouts, 64 clients one by one": (measure_many_clients, 10_000),
    "rollouts, batches of 100": (measure_batches, 20_000),
}
TARGETS = {
    ("memory", "model calls, batches of 100"): 10.0,
    ("memory", "rollouts, one client one by one"): 1.5,
    ("memory", "rollouts, 64 clients one by one"): 1.5,
    ("memory", "rollouts, batches of 100"): 3.0,
    ("SQLite", "model calls, batches of 100"): 5.0,
    ("SQLite", "rollouts, one client one by one"): 1.0,
    ("SQLite", "rollouts, 64 clients one by one"): 1.0,
    ("SQLite", "rollouts, batches of 100"): 1.0,
}
"""(store, measurement) → minimum ratio to the peer's rate per CPU second."""
ROUNDS = 3
MAX_TRANSACTION_MS = 10.0
"""Maximum for the median of PostgreSQL's transactions."""
FLUSHED, POSTGRES = "SQLite, flushed", "PostgreSQL"

Rates = dict[str, Rate]


async def measure_store(url: str, quick: bool, part: int = 1) -> Rates:
    """Return the rate of each measurement, made once in a new store.

    `part` divides the amount of work, for stores whose writes wait long.
    """
    rates: Rates = {}
    for name, (measure, number) in MEASURES.items():
        number //= part
        number = number // 10 if quick else number
        async with open_store(url.format(len(rates))) as store:
            spent = await measure(store, number)
        rates[name] = Rate(number / spent.cpu, number / spent.wall)
    return rates


def measure_ours(quick: bool) -> dict[str, Rates]:
    """Return the rates of our memory and SQLite stores."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "memory": asyncio.run(measure_store("memory:", quick)),
            "SQLite": asyncio.run(measure_store(f"{Path(folder)}/{{}}.db", quick)),
        }


class Databases(NamedTuple):
    """One round of the comparison of PostgreSQL with SQLite that flushes every transaction."""

    columns: dict[str, Rates]
    transactions_ms: list[float]
    """Milliseconds of each of PostgreSQL's transactions."""


def measure_databases(quick: bool) -> Databases | None:
    """Return one round; None if PostgreSQL is not installed."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.postgres.cluster import Cluster, programs

    found = programs()
    if found is None:
        print("no PostgreSQL server here (apt-get install postgresql): not measured")
        return None
    with tempfile.TemporaryDirectory() as folder, Cluster(found, place="/var/tmp") as cluster:
        flushed = f"{Path(folder)}/{{}}.db?power_loss=true"
        with timed_transactions() as taken_ms:
            columns = {
                FLUSHED: asyncio.run(measure_store(flushed, quick, part=5)),
                POSTGRES: asyncio.run(measure_store(cluster.url("b{}"), quick, part=5)),
            }
    return Databases(columns, taken_ms)


@contextmanager
def timed_transactions() -> Iterator[list[float]]:
    """Yield a list that gets the milliseconds of each PostgreSQL transaction in the block.

    A transaction is timed from when it has its lock.
    """
    from lightspan_cluster.postgres.tables import PostgresWriteTables

    begin, commit = PostgresWriteTables.begin, PostgresWriteTables.commit
    begun: dict[int, float] = {}
    taken: list[float] = []

    def timed_begin(tables: PostgresWriteTables, *, to_move: bool) -> None:
        begin(tables, to_move=to_move)
        begun[id(tables)] = time.perf_counter()

    def timed_commit(tables: PostgresWriteTables) -> None:
        commit(tables)
        taken.append(1000 * (time.perf_counter() - begun[id(tables)]))

    with (
        mock.patch.object(PostgresWriteTables, "begin", timed_begin),
        mock.patch.object(PostgresWriteTables, "commit", timed_commit),
    ):
        yield taken


def figures_of_databases(rounds: list[Databases]) -> list[Figure]:
    """Return the rows for PostgreSQL's rates per wall second, and for its transactions."""
    ours, theirs = (median([one.columns[c] for one in rounds]) for c in (POSTGRES, FLUSHED))
    taken = sorted(ms for one in rounds for ms in one.transactions_ms)
    quantiles = {share: taken[int(len(taken) * share)] for share in (0.5, 0.9, 0.99)}
    return [
        *(
            Figure(
                what=f"{POSTGRES}: {name}",
                unit="per s",
                ours=ours[name].per_s,
                peer=FLUSHED,
                theirs=theirs[name].per_s,
                more_is_better=True,
                note=f"{ours[name].per_cpu_s:,.0f} per CPU-s of this process",
            )
            for name in MEASURES
        ),
        Figure(
            what=f"{POSTGRES}: a write transaction, median of {len(taken):,}",
            unit="ms",
            ours=quantiles[0.5],
            at_most=MAX_TRANSACTION_MS,
            note=f"90 %: {quantiles[0.9]:.1f} ms, 99 %: {quantiles[0.99]:.1f} ms",
        ),
    ]


def measure_peer(quick: bool) -> Rates:
    """Return the rates of the peer's store, measured in its own environment."""
    found = run_peer(PEER, "peer_store.py", *(["--quick"] if quick else []))
    return {name: Rate(**rate) for name, rate in found.items()}


def median(rounds: list[Rates]) -> Rates:
    """Return, for each measurement, the round with the median rate per CPU second."""
    return {name: sorted(one[name] for one in rounds)[len(rounds) // 2] for name in rounds[0]}


def figures(columns: dict[str, Rates], peer: Rates) -> list[Figure]:
    """Return a row for each store and measurement, with the peer's rate if it has that one."""
    return [
        Figure(
            what=f"{column}: {name}",
            unit="per CPU-s",
            ours=rates[name].per_cpu_s,
            peer="0.3.0 memory" if name in peer else "",
            theirs=peer[name].per_cpu_s if name in peer else None,
            more_is_better=True,
            at_least=TARGETS.get((column, name)),
            note=_by_the_clock(rates[name], peer.get(name)),
        )
        for column, rates in columns.items()
        for name in MEASURES
    ]


def _by_the_clock(ours: Rate, theirs: Rate | None) -> str:
    """Return a text on the rates per wall second."""
    if theirs is None:
        return f"{ours.per_s:,.0f} per s"
    ratio = ours.per_s / theirs.per_s
    return f"{ours.per_s:,.0f} against {theirs.per_s:,.0f} per s: {ratio:.2f}x"


def main() -> int:
    """Measure us and the peer in turns and print the table; return 1 if a target is missed."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument(
        "--databases", action="store_true", help="SQLite, flushed, and PostgreSQL alone"
    )
    options = parser.parse_args()
    ours, peers, databases = [], [], []
    for _ in range(ROUNDS):
        if not options.databases:
            peers.append(measure_peer(options.quick))
            ours.append(measure_ours(options.quick))
        databases.append(measure_databases(options.quick))
    measured = []
    if ours:
        columns = {name: median([one[name] for one in ours]) for name in ours[0]}
        measured += figures(columns, median(peers))
    found = [one for one in databases if one is not None]
    if found:
        measured += figures_of_databases(found)
    return finish(measured, options.json)


if __name__ == "__main__":
    sys.exit(main())
