"""Put load on a served store, for `scale.py`, and measure what server and runners use.

The server runs in a process of its own; real runner processes use it over HTTP.

`served` starts `lightspan serve --store URL`; `measured_load` has runner processes work through it
and then leaves them idle. The apps are `_scale_apps.nothing`, which only returns a reward, and
`_rollout_apps.records`, which writes model calls as the gateway does.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from _peers import PeerError
from _rollout_apps import CALLS
from rollouts import SLOTS, check_calls, cpu_s, run_batch, working

from lightspan.schema.records import AttemptStatus, Report, Rollout, new_id
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_gateway.remote_store.url import KEY_VARIABLE

_KEY: Final = "benchmark-key-0123456789"
"""Key of a store server that only this benchmark can reach."""
SETTLED_S: Final = 3.0
"""Seconds to wait until all waiting clients have sent their request."""
_READY: Final = re.compile(r"serving the store \S+ at (http://\S+) ")


@dataclass(frozen=True)
class Server:
    """A running store server."""

    url: str
    pids: Sequence[int]
    """Its process and those of its database; their children count too."""

    def cpu_s(self) -> float:
        """Return the CPU seconds of the server's processes and their children so far."""
        found = {pid for root in self.pids for pid in _tree(root)}
        return cpu_s(sorted(found))


@dataclass(frozen=True)
class Load:
    """What runner processes achieved with a served store."""

    per_s: float
    """Rollouts per second of wall time, from enqueued until their end was seen."""
    server_ms: float
    """CPU milliseconds of the server and its database per rollout."""
    runners_ms: float
    """CPU milliseconds of the runner processes per rollout."""


@contextmanager
def served(store_url: str, log: Path, database: Sequence[int] = ()) -> Iterator[Server]:
    """Run `lightspan serve` in a process of its own until the block ends.

    Args:
        store_url: URL of a file or a database.
        log: file for the server's output.
        database: process ids whose CPU time counts as the server's.

    Raises:
        PeerError: the server did not start.
    """
    command = [sys.executable, "-m", "lightspan.cli", "serve", "--store", store_url]
    command += ["--port", "0", "--trainer-key-env", "BENCHMARK_KEY"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "BENCHMARK_KEY": _KEY},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    os.environ[KEY_VARIABLE] = _KEY
    try:
        yield Server(_ready(process, log), [process.pid, *database])
    finally:
        process.terminate()
        process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server answers, and return its address.

    Raises:
        PeerError: the server ended.
    """
    while process.poll() is None:
        found = _READY.search(log.read_text())
        if found is not None:
            return found[1]
        time.sleep(0.05)
    raise PeerError(f"the store server did not start:\n{log.read_text()[-2000:]}")


async def measured_load(
    server: Server, app: str, processes: int, number: int, rounds: int
) -> list[Load]:
    """Return the results of several rounds of rollouts, after the runner processes have started."""
    async with open_store(server.url) as store:
        run_id = new_id("run")
        async with working(store, app, processes, run_id) as runners:
            await run_batch(store, run_id, "", 2 * SLOTS * processes)
            return [
                await _batch(server, store, runners.pids, app, run_id, number)
                for _ in range(rounds)
            ]


async def _batch(
    server: Server, store: Store, pids: Sequence[int], app: str, run_id: str, number: int
) -> Load:
    begun, runners_s, server_s = time.perf_counter(), cpu_s(pids), server.cpu_s()
    ids = await run_batch(store, run_id, "", number)
    wall_s = time.perf_counter() - begun
    runners_s, server_s = cpu_s(pids) - runners_s, server.cpu_s() - server_s
    if app.endswith(":records"):
        await check_calls(store, ids)
    return Load(number / wall_s, 1000 * server_s / number, 1000 * runners_s / number)


async def measured_idle(server: Server, processes: int, spans_s: Sequence[float]) -> list[float]:
    """Return how many CPU seconds per second the server uses while runners wait for work.

    It is measured in consecutive intervals of the lengths `spans_s`.
    """
    idle = []
    async with open_store(server.url) as store:
        run_id = new_id("run")
        async with working(store, "_scale_apps:nothing", processes, run_id):
            await run_batch(store, run_id, "", 2 * SLOTS * processes)
            for seconds in spans_s:
                server_s = server.cpu_s()
                await asyncio.sleep(seconds)
                idle.append((server.cpu_s() - server_s) / seconds)
    return idle


async def measured_beside(server: Server, waiting: int, seconds: float) -> tuple[float, float]:
    """Return the rollouts per second of one client, alone and while `waiting` others wait.

    The client enqueues, claims and reports rollouts. The others wait for work of another training.
    """
    async with open_store(server.url) as store:
        alone = await _moved_per_s(store, seconds)
        async with _waiters(server.url, waiting):
            return alone, await _moved_per_s(store, seconds)


async def _moved_per_s(store: Store, seconds: float) -> float:
    run_id, moved = new_id("run"), 0
    begun = time.perf_counter()
    while (spent := time.perf_counter() - begun) < seconds:
        rollout = Rollout(rollout_id=new_id("ro"), run_id=run_id, task={}, task_id="t")
        await store.enqueue([rollout])
        [claim] = await store.claim("one", 1, 60.0, run_id)
        await store.report(
            [
                Report(
                    attempt_id=claim.attempt.attempt_id,
                    epoch=claim.attempt.epoch,
                    status=AttemptStatus.SUCCEEDED,
                )
            ]
        )
        moved += 1
    return moved / spent


@asynccontextmanager
async def _waiters(url: str, number: int) -> AsyncIterator[None]:
    """Yield when `number` clients, each with its own connections, wait for work."""
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(open_store(url)) for _ in range(number)]
        tasks = [
            asyncio.create_task(store.await_work(["none"], timeout_s=60.0)) for store in stores
        ]
        await asyncio.sleep(SETTLED_S)
        yield
        for task in tasks:
            assert not task.done(), "it was to wait all the time"
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tree(pid: int) -> list[int]:
    """Return the ids of a process and its living children; [] if it has ended."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def spans_per_s(load: Load) -> float:
    """Return the model calls per second; each has a span and a token record."""
    return CALLS * load.per_s
