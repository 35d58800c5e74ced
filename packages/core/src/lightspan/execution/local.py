"""Runners as processes on this machine, replaced when they die.

A process that dies takes several attempts with it. Who killed it is unknown, so their rollouts are
queued again at once without using up a try (the store bounds how often).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from lightspan.app import load_app
from lightspan.errors import AppError, ConfigError, LightspanError
from lightspan.execution import RunnerPlan
from lightspan.records import AttemptStatus, Outcome, Report, RolloutStatus, new_id
from lightspan.runner import Runner, RunnerConfig
from lightspan.store import Store
from lightspan.stores import open_store

log = logging.getLogger(__name__)

MAX_QUICK_DEATHS = 5
"""Consecutive deaths within `QUICK_S` of starting after which the runners give up."""
QUICK_S = 10.0
STUCK_EXIT = 3
"""Exit code of a process that was given up because a sync app ran past its limit."""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    name: str
    lifeline: Connection
    """Closing it tells the process to end."""
    started: float
    slots: int


class LocalRunners:
    """`slots` attempts at once, in `processes` spawned processes.

    Args:
        slots: attempts at once, over all processes.
        processes: 1 unless the app is heavy on the CPU.
        isolation: `"thread"` shares a process between attempts; `"process"` gives every attempt
            at work a process of its own (as many processes as slots).
    """

    def __init__(self, slots: int = 8, *, processes: int = 1, isolation: str = "thread") -> None:
        if slots < 1 or processes < 1:
            raise ConfigError(
                f"runners need at least one slot and process, not {slots}, {processes}"
            )
        if isolation not in ("thread", "process"):
            raise ConfigError(f'isolation must be "thread" or "process", not {isolation!r}')
        self.slots = slots
        self.isolation = isolation
        self.processes = slots if isolation == "process" else min(processes, slots)
        self._workers: list[_Worker] = []
        self._plan: RunnerPlan | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failure: LightspanError | None = None
        self._quick_deaths = 0

    async def start(self, plan: RunnerPlan) -> None:
        """Spawn the processes and wait until each has imported the app.

        Raises:
            AppError: a process cannot import it.
        """
        self._plan = plan
        workers = await asyncio.to_thread(self._spawn_all)
        self._workers = workers
        self._supervisor = asyncio.create_task(self._supervise(), name="lightspan-runners")

    def check(self) -> None:
        """Raises what made the runners give up."""
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """End the processes, by force after 10 s. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        workers, self._workers = self._workers, []
        await asyncio.to_thread(_end, workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the runners."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def _spawn_all(self) -> list[_Worker]:
        workers: list[_Worker] = []
        try:
            starting = [self._spawn(slots) for slots in _shares(self.slots, self.processes)]
            workers = [worker for worker, _ in starting]
            for worker, ready in starting:
                _wait_ready(worker, ready)
        except BaseException:
            _end(workers)
            raise
        return workers

    def _spawn(self, slots: int) -> tuple[_Worker, Connection]:
        assert self._plan is not None
        plan = msgspec.structs.replace(
            self._plan,
            slots=slots,
            environment=self.isolation == "process",
        )
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        name = new_id("runner")
        process = context.Process(
            target=_main, args=(msgspec.json.encode(plan), name, theirs), name=name, daemon=True
        )
        process.start()
        theirs.close()
        return _Worker(process, name, ours, time.monotonic(), slots), ours

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for worker in list(self._workers):
                if not worker.process.is_alive():
                    try:
                        await self._replace(worker)
                    except Exception as error:
                        self._failure = _explained(error)
                        return

    async def _replace(self, dead: _Worker) -> None:
        exit_code = dead.process.exitcode
        meant = exit_code in (0, STUCK_EXIT)
        quick = not meant and time.monotonic() - dead.started < QUICK_S
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        why = "holds a stuck app" if meant else f"died (exit code {exit_code})"
        log.warning("runner %s %s and is replaced", dead.name, why)
        await self._release(dead)
        self._workers.remove(dead)
        _end([dead])
        if self._quick_deaths >= MAX_QUICK_DEATHS:
            raise LightspanError(
                f"runner processes died {self._quick_deaths} times within {QUICK_S:g} s of "
                f"starting (last exit code {exit_code}); run the app alone to see why"
            )
        self._workers.append(await asyncio.to_thread(self._spawn_one, dead.slots))

    def _spawn_one(self, slots: int) -> _Worker:
        worker, ready = self._spawn(slots)
        _wait_ready(worker, ready)
        return worker

    async def _release(self, dead: _Worker) -> None:
        """Queue the rollouts of a dead process again."""
        assert self._plan is not None
        async with open_store(self._plan.store_url) as store:
            reports = await _lost_attempts(store, self._plan.run_id, dead.name)
            await store.report(reports)


def _shares(slots: int, processes: int) -> list[int]:
    """The slots of each process."""
    return [len(range(number, slots, processes)) for number in range(processes)]


def _explained(error: Exception) -> LightspanError:
    if isinstance(error, LightspanError):
        return error
    failure = LightspanError(f"the runners cannot be supervised: {error!r}")
    failure.__cause__ = error
    return failure


async def _lost_attempts(store: Store, run_id: str | None, runner: str) -> list[Report]:
    running = await store.rollouts(run_id=run_id, status=[RolloutStatus.RUNNING])
    attempts = await store.attempts([state.rollout.rollout_id for state in running])
    mine = [
        attempt
        for attempt in attempts
        if attempt.runner_id == runner and attempt.status is AttemptStatus.RUNNING
    ]
    return [
        Report(
            attempt_id=attempt.attempt_id,
            epoch=attempt.epoch,
            status=AttemptStatus.LOST,
            outcome=Outcome.INFRASTRUCTURE,
            message="the runner's process died",
            counts=len(mine) == 1,
        )
        for attempt in mine
    ]


def _wait_ready(worker: _Worker, ready: Connection) -> None:
    try:
        message = ready.recv()
    except EOFError:
        worker.process.join(5)
        raise AppError(
            f"a runner process ended before it was ready (exit code {worker.process.exitcode}); "
            "a script that starts training must do so under `if __name__ == '__main__':`"
        ) from None
    if message is not None:
        raise AppError(message)


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.lifeline.close()
    deadline = time.monotonic() + 10
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process.close()


# --- inside the process ---------------------------------------------------------------------
def _main(data: bytes, name: str, lifeline: Connection) -> None:
    """The process's entry: import the app, say so, work until the lifeline closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; it ends us
    # the parent ends us in any case; as a daemon an app could not use multiprocessing
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    plan = msgspec.json.decode(data, type=RunnerPlan)
    sys.path[:] = [*plan.sys_path, *(path for path in sys.path if path not in plan.sys_path)]
    try:
        app = load_app(plan.app)
    except LightspanError as error:
        lifeline.send(str(error))
        return
    lifeline.send(None)
    stuck = asyncio.run(_work(plan, app, name, lifeline))
    if stuck:
        os._exit(STUCK_EXIT)  # a thread of the app holds on; waiting for it would hang us


async def _work(plan: RunnerPlan, app: Any, name: str, lifeline: Connection) -> bool:
    config = RunnerConfig(
        slots=plan.slots,
        run_id=plan.run_id,
        lease_s=plan.lease_s,
        name=name,
        environment=plan.environment,
    )
    async with open_store(plan.store_url) as store:
        runner = Runner(store, app, config)
        _watch(lifeline, asyncio.get_running_loop(), runner)
        await runner.run()
        return runner.stuck


def _watch(lifeline: Connection, loop: asyncio.AbstractEventLoop, runner: Runner) -> None:
    """End with the parent: its end of the pipe closes even when it is killed."""

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(runner.abort)
        time.sleep(8)
        os._exit(4)  # the app did not let go

    threading.Thread(target=wait, name="lightspan-lifeline", daemon=True).start()
