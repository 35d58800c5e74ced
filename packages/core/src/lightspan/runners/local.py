"""Runners as processes on this machine, of this interpreter or another, replaced when they die.

A process that dies takes several attempts with it. Who killed it is unknown, so their rollouts are
queued again at once, to be run one by one in processes of their own (`deaths`); no task that kills
its process ends the run. Only processes that die before they have run anything do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

import msgspec

from lightspan import child_processes
from lightspan.errors import AppError, ConfigError, LightspanError
from lightspan.runners import foreign_python
from lightspan.runners.crash_recovery import QUICK_S, ProcessExit, bury, describe_exit
from lightspan.runners.process_main import DAMAGED, WorkerCommand, WorkerStatus, work
from lightspan.runners.protocol import RunnerPlan, check_leaves_home
from lightspan.schema import clock
from lightspan.schema.records import new_id
from lightspan.schema.validation import check_whole
from lightspan.stores import open_store
from lightspan.stores.credentials import secrets_of

log = logging.getLogger(__name__)

MAX_QUICK_DEATHS = 5
"""Consecutive deaths within `QUICK_S` of starting, with no attempt claimed, after which the runners
give up."""
_SILENT_LEASES: Final = 2 / 3
"""Of a lease, before which it does not run out: it was extended a sixth of one before, at most."""
_ABORT_S: Final = 2.0
"""How long a process may take to print where it is."""
_POLL_INTERVAL_S: Final = 0.1
"""Between two looks at the processes."""
_SILENT_S: Final = 5.0
"""No process is taken for dead before, however short the lease."""
_UNGUARDED_EXIT: Final = 4
"""Exit code of a process whose import of the script came to where training starts."""
_PROCESSES: Final = multiprocessing.get_context("spawn")
"""How those of this interpreter are started: with nothing of ours but what they import."""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess | foreign_python.Subprocess
    name: str
    parent_pipe: Connection
    """Closing it tells the process to end."""
    started: float
    plan: RunnerPlan
    """Its own."""
    latest: WorkerStatus = field(default_factory=WorkerStatus)
    """What the process said last."""
    silence_s: float = 0.0
    """For how long it has said nothing, in looks: while we were suspended, so was the process."""

    def hear(self) -> None:
        """Take in what the process has said."""
        self.silence_s += _POLL_INTERVAL_S
        with contextlib.suppress(EOFError, OSError, *DAMAGED):
            while self.parent_pipe.poll():
                self.latest = msgspec.json.decode(self.parent_pipe.recv_bytes(), type=WorkerStatus)
                self.silence_s = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether it has said nothing for so long that its attempts may soon be lost: something
        keeps the GIL."""
        limit = max(_SILENT_S, self.plan.lease_s * _SILENT_LEASES)
        return self.latest.beats and self.silence_s > limit

    def kill(self) -> None:
        """End it by force, and what its apps have started."""
        left = [] if self.process.pid is None else child_processes.left_by(self.process.pid)
        self.process.kill()
        self.process.join()
        child_processes.kill(left)

    def abort(self) -> None:
        """End a process that says nothing; `faulthandler` prints there where it is."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGABRT)
        self.process.join(_ABORT_S)
        self.kill()

    def death(self, *, is_silent: bool) -> ProcessExit:
        """Return how the process, which is dead, ended."""
        silence = f"said nothing for {self.silence_s:.0f} s, as if something kept the GIL, and was"
        how = f"{silence} ended" if is_silent else describe_exit(self.process.exitcode)
        if self.latest.reason:
            how = f"ended itself, because {self.latest.reason}"
        return ProcessExit(
            runner=self.name,
            how=self.latest.leaves or how,
            is_blameless=bool(self.latest.leaves),
        )


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
        app_dirs: foreign_python.Folders | None = None,
    ) -> None:
        check_whole("slots", slots, 1)
        check_whole("processes", processes, 1)
        if isolation not in ("thread", "process"):
            raise ConfigError(f'isolation must be "thread" or "process", not {isolation!r}')
        if app_dirs is not None and python is None:
            raise ConfigError("app_dirs= belongs to python=: runners of this one share sys.path")
        self.slots = slots
        self.isolation = isolation
        self.python = None if python is None else foreign_python.find_interpreter(python)
        self._app_dirs = foreign_python.app_folders(app_dirs) if self.python is not None else []
        self.processes = slots if isolation == "process" else min(processes, slots)
        self._workers: list[_Worker] = []
        self._plan: RunnerPlan | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failure: LightspanError | None = None
        self._useless = 0
        """Deaths in a row of processes that had run nothing."""
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
        self._workers = await self._start_all(shares(self.slots, self.processes))
        self._supervisor = asyncio.create_task(self._supervise(), name="lightspan-runners")

    def check(self) -> None:
        """Raises what made the runners give up."""
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """End the processes, by force after 10 s. Idempotent."""
        # Before anything is waited for: whoever is cancelled here must not leave behind processes
        # that go on without a gateway.
        _let_go(self._workers)
        await self._end_supervision()
        workers, self._workers, self._runs = self._workers, [], None
        self._claimed_before += sum(worker.latest.claimed for worker in workers)
        await asyncio.to_thread(_end, workers)

    def work_for(self, run_ids: Sequence[str]) -> None:
        """Have processes that join (`RunnerPlan.joins`) work for these runs from now on."""
        self._runs = list(run_ids)
        for worker in self._workers:
            _order(worker, WorkerCommand(runs=self._runs))

    async def drain(self) -> None:
        """Claim nothing more; returns when the attempts under way have ended."""
        await self._end_supervision()
        for worker in self._workers:
            _order(worker, WorkerCommand(stop=True))
        leaving = list(self._workers)
        while leaving:
            for worker in list(leaving):
                if (death := await self._death(worker)) is not None:
                    leaving.remove(worker)
                    if worker.latest.running:
                        log.warning("runner %s %s", worker.name, death.how)
                        await self._bury(death)
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _end_supervision(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None

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

    async def _start_all(self, shares: Sequence[int]) -> list[_Worker]:
        """Start a process for so many slots each; all have ended if this raises."""
        workers: list[_Worker] = []
        spawning = asyncio.create_task(asyncio.to_thread(self._spawn_all, workers, shares))
        try:
            await asyncio.shield(spawning)
        except asyncio.CancelledError:
            while not spawning.done():  # the thread waits for them, perhaps for a slow import
                for worker in workers:
                    with contextlib.suppress(ValueError):  # the thread has just ended it
                        worker.process.kill()
                await asyncio.wait([spawning], timeout=0.05)
            if spawning.exception() is None:
                await asyncio.to_thread(_end, workers)
            raise
        return workers

    def _spawn_all(self, workers: list[_Worker], shares: Sequence[int]) -> None:
        """Add each process to `workers` as it starts; all have ended if this raises."""
        try:
            for slots in shares:
                workers.append(self._spawn(slots))  # noqa: PERF401 - those that started are ended
            for worker in workers:
                self._wait_ready(worker)
        except BaseException:
            _end(workers)
            raise

    def _spawn(self, slots: int) -> _Worker:
        assert self._plan is not None
        name = new_id(self._plan.prefix)
        plan = msgspec.structs.replace(
            self._plan,
            store_secrets=secrets_of(self._plan.store_url),
            slots=slots,
            environment=self.isolation == "process",
        )
        with _without_interrupts():
            process, parent_pipe = self._start_process(plan, name)
        return _Worker(process, name, parent_pipe, clock.monotonic(), plan)

    def _start_process(
        self, plan: RunnerPlan, name: str
    ) -> tuple[BaseProcess | foreign_python.Subprocess, Connection]:
        if self.python is not None:
            return foreign_python.start(self.python)
        ours, theirs = _PROCESSES.Pipe()
        method = multiprocessing.get_start_method(allow_none=True)
        args = (msgspec.json.encode(plan), name, theirs, method)
        process = _PROCESSES.Process(target=_main, args=args, name=name, daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _wait_ready(self, worker: _Worker) -> None:
        """Raises `AppError` or `ConfigError` if the process cannot be a runner."""
        where = ""
        if self.python is not None:
            assert isinstance(worker.process, foreign_python.Subprocess)
            foreign_python.greet(
                self.python, worker.process, worker.parent_pipe, worker.plan, worker.name
            )
            where = (
                f" (in {self.python}: install there what is missing, or name the folder of the "
                "app's modules with app_dirs=)"
            )
        try:
            word = msgspec.json.decode(worker.parent_pipe.recv_bytes(), type=WorkerStatus)
        except (EOFError, OSError):
            worker.process.join(5)
            if worker.process.exitcode == _UNGUARDED_EXIT:
                raise AppError(
                    f"{_main_script()} trains when it is imported, and runner processes import it: "
                    "put what starts training under `if __name__ == '__main__':`"
                ) from None
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
            _order(worker, WorkerCommand(runs=self._runs))

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            for worker in list(self._workers):
                death = await self._death(worker)
                if death is not None:
                    try:
                        await self._replace(worker, death)
                    except Exception as error:
                        self._failure = _explained(error)
                        return

    async def _death(self, worker: _Worker) -> ProcessExit | None:
        """Return how a process has ended, or was ended for its silence; None while it lives."""
        # Its death is seen before what it has said is read: nothing of it is missed.
        is_dead = not worker.process.is_alive()
        worker.hear()
        is_silent = not is_dead and worker.is_silent
        if is_silent:
            await asyncio.to_thread(worker.abort)
        return worker.death(is_silent=is_silent) if is_dead or is_silent else None

    async def _bury(self, death: ProcessExit) -> None:
        """End the attempts that a process had under way. Where the store does not do that, as a
        server that starts again, they end with their leases: nothing is lost by it but time."""
        assert self._plan is not None
        try:
            async with open_store(self._plan.store_url) as store:
                for report in await bury(death, store, self._plan.run_id):
                    log.warning("attempt %s: %s", report.attempt_id, report.message)
        except LightspanError as error:
            log.warning("the attempts of runner %s end with their leases: %s", death.runner, error)

    async def _replace(self, dead: _Worker, death: ProcessExit) -> None:
        is_quick = clock.monotonic() - dead.started < QUICK_S
        is_useless = is_quick and not death.is_blameless and not dead.latest.claimed
        self._useless = self._useless + 1 if is_useless else 0
        log.warning("runner %s %s and is replaced", dead.name, death.how)
        await self._bury(death)
        self._workers.remove(dead)
        self._claimed_before += dead.latest.claimed
        _end([dead])
        if self._useless >= MAX_QUICK_DEATHS:
            raise LightspanError(
                f"runner processes died {self._useless} times within {QUICK_S:g} s of starting, "
                f"before they ran anything (the last one {death.how}); run the app alone to see why"
            )
        self._workers += await self._start_all([dead.plan.slots])


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keeps Ctrl-C from a process that is started in the block until it asks for it: it inherits
    the mask. Without, a Ctrl-C before the process gets to `_main` makes it print a traceback of its
    own.
    """
    # The tracker starts with the first process, and unblocks the signal: so it has to be there
    # already.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shares(slots: int, processes: int) -> list[int]:
    """The slots of each process."""
    return [len(range(number, slots, processes)) for number in range(processes)]


def _explained(error: Exception) -> LightspanError:
    if isinstance(error, LightspanError):
        return error
    failure = LightspanError(f"the runners cannot be supervised: {error!r}")
    failure.__cause__ = error
    return failure


def _order(worker: _Worker, order: WorkerCommand) -> None:
    with contextlib.suppress(OSError):  # it has just died, and its successor is told
        worker.parent_pipe.send_bytes(msgspec.json.encode(order))


def _let_go(workers: Iterable[_Worker]) -> None:
    """Tell processes to end, and to give back what they have."""
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.parent_pipe.close()


def _end(workers: Sequence[_Worker]) -> None:
    _let_go(workers)
    deadline = clock.monotonic() + 10
    for worker in workers:
        # Not `join`, which waits for children too that an app has forked and left.
        while worker.process.is_alive() and clock.monotonic() < deadline:
            time.sleep(0.01)
        if worker.process.is_alive():
            worker.kill()
        worker.process.close()


def end_if_imported_by_a_runner() -> None:
    """Where training starts: a script without a main guard starts it in every runner process too,
    which imports the script before anything else. Such a process ends; its parent says why."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(_UNGUARDED_EXIT)


def _main_script() -> str:
    return os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "the script")


def _main(data: bytes, name: str, parent_pipe: Connection, method: str | None) -> None:
    """The entry of a process of this interpreter."""
    # A spawned process starts its own by spawning, too: the app is to find what it would find here.
    multiprocessing.set_start_method(method, force=True)
    work(msgspec.json.decode(data, type=RunnerPlan), name, parent_pipe)
