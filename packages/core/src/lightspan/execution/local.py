"""Runners as processes on this machine, of this interpreter or another, replaced when they die.

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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from lightspan.checks import check_whole
from lightspan.errors import AppError, ConfigError, LightspanError
from lightspan.execution import RunnerPlan, check_leaves_home, interpreters
from lightspan.execution.worker import STUCK_EXIT, Order, Word, work
from lightspan.records import AttemptStatus, Outcome, Report, RolloutStatus, new_id
from lightspan.store import Store
from lightspan.stores import open_store

log = logging.getLogger(__name__)

MAX_QUICK_DEATHS = 5
"""Consecutive deaths within `QUICK_S` of starting after which the runners give up."""
QUICK_S = 10.0


class _Process(Protocol):
    """What is asked of a process, be it `multiprocessing`'s or another interpreter's."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Worker:
    process: _Process
    name: str
    lifeline: Connection
    """Closing it tells the process to end."""
    started: float
    plan: RunnerPlan
    latest: Word = field(default_factory=Word)
    """What the process said last."""


class LocalRunners:
    """`slots` attempts at once, in `processes` spawned processes.

    Args:
        slots: attempts at once, over all processes.
        processes: 1 unless the app is heavy on the CPU.
        isolation: `"thread"` shares a process between attempts; `"process"` gives every attempt
            at work a process of its own (as many processes as slots).
        python: the interpreter of the app's own environment, such as `".venv-app/bin/python"`;
            None for this one. That environment needs the app, what it imports, and lightspan
            (without extras); nothing that is installed here is seen there.
        app_dirs: a folder or several in which `python` finds the app's modules, beside what is
            installed there; None for the folder of the running script and the working folder.

    Raises:
        ConfigError: an option that cannot be honoured.
    """

    def __init__(
        self,
        slots: int = 8,
        *,
        processes: int = 1,
        isolation: str = "thread",
        python: str | os.PathLike[str] | None = None,
        app_dirs: interpreters.Folders | None = None,
    ) -> None:
        check_whole("slots", slots, 1)
        check_whole("processes", processes, 1)
        if isolation not in ("thread", "process"):
            raise ConfigError(f'isolation must be "thread" or "process", not {isolation!r}')
        if app_dirs is not None and python is None:
            raise ConfigError("app_dirs= belongs to python=: runners of this one share sys.path")
        self.slots = slots
        self.isolation = isolation
        self.python = None if python is None else interpreters.find_interpreter(python)
        self._app_dirs = interpreters.app_folders(app_dirs) if self.python is not None else []
        self.processes = slots if isolation == "process" else min(processes, slots)
        self._workers: list[_Worker] = []
        self._plan: RunnerPlan | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failure: LightspanError | None = None
        self._quick_deaths = 0
        self._runs: list[str] | None = None
        self._claimed_before = 0
        """By processes that are gone."""

    async def start(self, plan: RunnerPlan) -> None:
        """Spawn the processes and wait until each has imported the app.

        Raises:
            AppError: a process cannot import it.
            ConfigError: the interpreter is none, or its lightspan does not fit this one.
        """
        if self.python is not None:
            check_leaves_home(plan.app)
            plan = msgspec.structs.replace(plan, sys_path=self._app_dirs)
        self._plan = plan
        starting: list[_Worker] = []
        try:
            await asyncio.to_thread(self._spawn_all, starting)
        except asyncio.CancelledError:  # the thread waits for them, perhaps for a slow import
            for worker in starting:
                worker.process.kill()
            raise
        self._workers = starting
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
        workers, self._workers, self._runs = self._workers, [], None
        self._claimed_before += sum(worker.latest.claimed for worker in workers)
        await asyncio.to_thread(_end, workers)

    def work_for(self, run_ids: Sequence[str]) -> None:
        """Have processes that join (`RunnerPlan.joins`) work for these runs from now on."""
        self._runs = list(run_ids)
        for worker in self._workers:
            _order(worker, Order(runs=self._runs))

    async def drain(self) -> None:
        """Claim nothing more; returns when the attempts under way have ended."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        for worker in self._workers:
            _order(worker, Order(stop=True))
        while any(worker.process.is_alive() for worker in self._workers):
            self._hear()
            await asyncio.sleep(0.05)
        self._hear()

    @property
    def claimed(self) -> int:
        """Attempts that processes which join have claimed."""
        return self._claimed_before + sum(worker.latest.claimed for worker in self._workers)

    @property
    def running(self) -> int:
        """Attempts that processes which join have under way."""
        alive = [worker for worker in self._workers if worker.process.is_alive()]
        return sum(worker.latest.running for worker in alive)

    @property
    def pids(self) -> list[int]:
        """Process ids of the runners."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def _spawn_all(self, workers: list[_Worker]) -> None:
        """Add each process to `workers` as it starts; all have ended if this raises."""
        try:
            for slots in _shares(self.slots, self.processes):
                workers.append(self._spawn(slots))  # noqa: PERF401 - those that started are ended
            for worker in workers:
                self._wait_ready(worker)
        except BaseException:
            _end(workers)
            raise

    def _spawn(self, slots: int) -> _Worker:
        assert self._plan is not None
        plan = msgspec.structs.replace(
            self._plan,
            slots=slots,
            environment=self.isolation == "process",
        )
        name = new_id("runner")
        with _without_interrupts():
            process, lifeline = self._start_process(plan, name)
        return _Worker(process, name, lifeline, time.monotonic(), plan)

    def _start_process(self, plan: RunnerPlan, name: str) -> tuple[_Process, Connection]:
        if self.python is not None:
            return interpreters.start(self.python)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_main, args=(msgspec.json.encode(plan), name, theirs), name=name, daemon=True
        )
        process.start()
        theirs.close()
        return process, ours

    def _wait_ready(self, worker: _Worker) -> None:
        """Raises `AppError` or `ConfigError` if the process cannot be a runner."""
        where = ""
        if self.python is not None:
            assert isinstance(worker.process, interpreters.Subprocess)
            interpreters.greet(
                self.python, worker.process, worker.lifeline, worker.plan, worker.name
            )
            where = (
                f" (in {self.python}: install there what is missing, or name the folder of the "
                "app's modules with app_dirs=)"
            )
        try:
            word = msgspec.json.decode(worker.lifeline.recv_bytes(), type=Word)
        except (EOFError, OSError):
            worker.process.join(5)
            advice = where or (
                "; a script that starts training must do so under `if __name__ == '__main__':`"
            )
            raise AppError(
                "a runner process ended before it was ready (exit code "
                f"{worker.process.exitcode}){advice}"
            ) from None
        if word.error is not None:
            raise AppError(word.error + where)
        if self._runs is not None:
            _order(worker, Order(runs=self._runs))

    def _hear(self) -> None:
        """What processes that join have said."""
        for worker in self._workers:
            with contextlib.suppress(EOFError, OSError):
                while worker.lifeline.poll():
                    worker.latest = msgspec.json.decode(worker.lifeline.recv_bytes(), type=Word)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self._hear()
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
        self._claimed_before += dead.latest.claimed
        _end([dead])
        if self._quick_deaths >= MAX_QUICK_DEATHS:
            raise LightspanError(
                f"runner processes died {self._quick_deaths} times within {QUICK_S:g} s of "
                f"starting (last exit code {exit_code}); run the app alone to see why"
            )
        self._workers.append(await asyncio.to_thread(self._spawn_one, dead.plan.slots))

    def _spawn_one(self, slots: int) -> _Worker:
        worker = self._spawn(slots)
        try:
            self._wait_ready(worker)
        except BaseException:
            _end([worker])
            raise
        return worker

    async def _release(self, dead: _Worker) -> None:
        """Queue the rollouts of a dead process again."""
        assert self._plan is not None
        async with open_store(self._plan.store_url) as store:
            reports = await _lost_attempts(store, self._plan.run_id, dead.name)
            await store.report(reports)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started here does not hear Ctrl-C until it asks to: it inherits the mask.

    Before it gets to `_main` it would print a traceback of its own.
    """
    resource_tracker.ensure_running()  # it starts with the first process, and unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def _order(worker: _Worker, order: Order) -> None:
    with contextlib.suppress(OSError):  # it has just died, and its successor is told
        worker.lifeline.send_bytes(msgspec.json.encode(order))


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


def _main(data: bytes, name: str, lifeline: Connection) -> None:
    """The entry of a process of this interpreter."""
    work(msgspec.json.decode(data, type=RunnerPlan), name, lifeline)
