"""Run runners as processes on this machine, and replace processes that die.

The processes use this interpreter or another. When a process dies, all its attempts are lost, and
which attempt caused the death is unknown. The rollouts are requeued at once, to be run one by one
in processes of their own (`crash_recovery`). So a task that kills its process does not end the
training. The training ends if processes repeatedly die before they have claimed an attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

import msgspec

from lightspan import child_processes
from lightspan.child_processes import blocked_signals
from lightspan.errors import AppError, ConfigError, LightspanError
from lightspan.runners import foreign_python
from lightspan.runners.crash_recovery import ProcessExit, describe_exit, requeue_attempts
from lightspan.runners.process_main import DECODE_ERRORS, WorkerCommand, WorkerStatus, work
from lightspan.runners.protocol import RunnerPlan, check_importable
from lightspan.schema import clock
from lightspan.schema.records import new_id
from lightspan.schema.validation import check_choice, check_whole
from lightspan.stores import open_store
from lightspan.stores.credentials import secrets_of

log = logging.getLogger(__name__)

_MAX_SILENT_LEASES: Final = 2 / 3
"""Fraction of the length of a lease. A process that sends no heartbeat for this time is ended. Its
leases are still valid then, since they were extended at most a sixth of a lease before the last
heartbeat."""
_ABORT_S: Final = 2.0
"""Maximum seconds that a process may take to print its stack before it is killed."""
_IMPORTED_EXIT: Final = 4
"""Exit code of a runner process that imports the user's script, if the script starts a training
when it is imported."""
_PROCESSES: Final = multiprocessing.get_context("spawn")
"""The start method "spawn". A spawned process inherits no state of this process."""


@dataclass(slots=True)
class _Worker:
    """A runner process, as its parent sees it."""

    process: BaseProcess | foreign_python.Subprocess
    name: str
    parent_pipe: Connection
    """Pipe for messages; the process ends when the pipe is closed."""
    started: float
    """Start time by `clock.monotonic`."""
    plan: RunnerPlan
    latest: WorkerStatus = field(default_factory=WorkerStatus)
    """The latest status that the process has sent."""
    silent_s: float = 0.0
    """Seconds since the latest status, computed from the number of checks. Time for which this
    process was suspended together with the runner process does not count."""

    def read_status(self) -> None:
        """Read all messages that the process has sent, and update `latest` and `silent_s`."""
        self.silent_s += self.plan.timings.poll_interval_s
        with contextlib.suppress(EOFError, OSError, *DECODE_ERRORS):
            while self.parent_pipe.poll():
                self.latest = msgspec.json.decode(self.parent_pipe.recv_bytes(), type=WorkerStatus)
                self.silent_s = 0.0

    def send(self, command: WorkerCommand) -> None:
        """Send a command to the process."""
        with contextlib.suppress(OSError):  # it has just died; its replacement gets the command
            self.parent_pipe.send_bytes(msgspec.json.encode(command))

    @property
    def is_silent(self) -> bool:
        """Whether heartbeats have been missing for so long that leases may expire soon.

        The usual cause is C code that holds the GIL.
        """
        limit = max(self.plan.timings.min_silence_s, self.plan.lease_s * _MAX_SILENT_LEASES)
        return self.latest.beats and self.silent_s > limit

    def kill(self) -> None:
        """Kill the process and the child processes of its apps."""
        children = [] if self.process.pid is None else child_processes.left_by(self.process.pid)
        self.process.kill()
        self.process.join()
        child_processes.kill(children)

    def abort(self) -> None:
        """End a process without heartbeats, after its `faulthandler` has printed the stack."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGABRT)
        self.process.join(_ABORT_S)
        self.kill()

    def death(self, *, is_silent: bool) -> ProcessExit:
        """Return how the process ended. It must have ended.

        Args:
            is_silent: whether it was ended because of missing heartbeats.
        """
        how = describe_exit(self.process.exitcode)
        if is_silent:
            how = f"sent no heartbeat for {self.silent_s:.0f} s (was the GIL held?) and was ended"
        if self.latest.reason:
            how = f"ended itself, because {self.latest.reason}"
        leaves = self.latest.leaves
        return ProcessExit(runner=self.name, how=leaves or how, is_blameless=bool(leaves))


class LocalRunners:
    """Runners as spawned processes on this machine.

    Args:
        slots: maximum number of concurrent attempts, over all processes.
        processes: number of processes; more than 1 is useful if the app needs much CPU time.
        isolation: with `"thread"`, the attempts share the processes. With `"process"`, every
            concurrent attempt has its own process, so there are as many processes as slots.
        python: the interpreter of the app's own environment, such as `".venv-app/bin/python"`; None
            for this interpreter. The app's environment needs the app, its dependencies and
            lightspan (without extras); packages of this environment are not visible there.
        app_dirs: one or several folders in which `python` finds the app's modules, in addition to
            its installed packages; None for the folder of the running script and the working
            folder. Only with `python`.

    Raises:
        ConfigError: an option has an invalid value.
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
        check_choice("isolation", isolation, ("thread", "process"))
        if app_dirs is not None and python is None:
            raise ConfigError("app_dirs= needs python=: runners of this interpreter share sys.path")
        self.slots = slots
        self.isolation = isolation
        self.python = None if python is None else foreign_python.find_interpreter(python)
        self._app_dirs = foreign_python.app_folders(app_dirs) if self.python is not None else []
        self.processes = slots if isolation == "process" else min(processes, slots)
        self._workers: list[_Worker] = []
        self._plan: RunnerPlan | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failure: LightspanError | None = None
        self._quick_deaths = 0
        """Number of consecutive processes that died soon after their start without claiming an
        attempt."""
        self._before = Counter[str]()
        """`counts` of the processes that have ended."""

    async def start(self, plan: RunnerPlan) -> None:
        """Start the processes and wait until each has imported the app.

        Raises:
            AppError: a process cannot import the app, or ended while it started.
            ConfigError: the interpreter or its version of lightspan cannot be used.
        """
        if self.python is not None:
            check_importable(plan.app)
            plan = msgspec.structs.replace(plan, sys_path=self._app_dirs)
        self._plan = plan
        self._workers = await self._start_all(shares(self.slots, self.processes))
        self._supervisor = asyncio.create_task(self._supervise(), name="lightspan-runners")

    def check(self) -> None:
        """Raise an error if the runners cannot go on.

        Raises:
            LightspanError: processes died too often, or cannot be supervised.
        """
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """End the processes, and kill those that have not ended after 10 s. Idempotent."""
        # Before the first await: if this is cancelled, no process may go on without a gateway.
        _close_pipes(self._workers)
        await self._end_supervision()
        workers, self._workers = self._workers, []
        await asyncio.to_thread(_end, workers)
        self._before += _counts(workers)

    async def _end_supervision(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None

    @property
    def counts(self) -> Counter[str]:
        """Numbers of attempts: the sums of the `COUNTS` of `WorkerStatus` over all processes.

        After `stop`, `running` is the number of attempts without a report whose processes were
        killed. The store has the exact number of these.
        """
        return self._before + _counts(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the runners."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    # --- starting -------------------------------------------------------------------------
    async def _start_all(self, shares: Sequence[int]) -> list[_Worker]:
        """Start one process per item of `shares`, and wait until all are ready.

        If this raises an exception, all started processes have ended.

        Args:
            shares: number of slots of each process.
        """
        workers: list[_Worker] = []
        spawning = asyncio.create_task(asyncio.to_thread(self._spawn_all, workers, shares))
        try:
            await asyncio.shield(spawning)
        except asyncio.CancelledError:
            while not spawning.done():  # the thread may be waiting for a slow import
                for worker in workers:
                    with contextlib.suppress(ValueError):  # the thread has just ended the process
                        worker.process.kill()
                await asyncio.wait([spawning], timeout=0.05)
            if spawning.exception() is None:
                await asyncio.to_thread(_end, workers)
            raise
        return workers

    def _spawn_all(self, workers: list[_Worker], shares: Sequence[int]) -> None:
        """Start one process per item of `shares`, and wait until all are ready.

        If this raises an exception, all started processes have ended.

        Args:
            workers: list to which each process is added when it has started.
            shares: number of slots of each process.
        """
        try:
            for slots in shares:
                workers.append(self._spawn(slots))  # noqa: PERF401 - to end those that started
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
        # The process inherits the mask, and unblocks SIGINT itself: a Ctrl-C before that would
        # print a traceback. The resource tracker would unblock SIGINT here as it starts.
        resource_tracker.ensure_running()
        with blocked_signals(signal.SIGINT), _hash_seed():
            process, parent_pipe = self._start_process(plan, name)
        return _Worker(process, name, parent_pipe, clock.monotonic(), plan)

    def _start_process(
        self, plan: RunnerPlan, name: str
    ) -> tuple[BaseProcess | foreign_python.Subprocess, Connection]:
        if self.python is not None:
            return foreign_python.start(self.python)
        parent_end, child_end = _PROCESSES.Pipe()
        method = multiprocessing.get_start_method(allow_none=True)
        args = (msgspec.json.encode(plan), name, child_end, method)
        process = _PROCESSES.Process(target=_main, args=args, name=name, daemon=True)
        process.start()
        child_end.close()
        return process, parent_end

    def _wait_ready(self, worker: _Worker) -> None:
        """Wait until a process has imported the app and sent its first status.

        Raises:
            AppError: the process cannot import the app, or ended.
            ConfigError: the interpreter or its version of lightspan cannot be used.
        """
        where = ""
        if self.python is not None:
            assert isinstance(worker.process, foreign_python.Subprocess)
            foreign_python.handshake(
                self.python, worker.process, worker.parent_pipe, worker.plan, worker.name
            )
            folder = "name the folder of the app's modules with app_dirs="
            where = f" (in {self.python}: install there what is missing, or {folder})"
        try:
            status = msgspec.json.decode(worker.parent_pipe.recv_bytes(), type=WorkerStatus)
        except (EOFError, OSError):
            worker.process.join(5)
            code = worker.process.exitcode
            script = getattr(sys.modules["__main__"], "__file__", None) or "the script"
            guard = "start training under `if __name__ == '__main__':`"
            hint = where or f"; in a script, {guard}"
            text = f"a runner process ended before it was ready (exit code {code}){hint}"
            if code == _IMPORTED_EXIT:
                text = f"{os.path.basename(script)} starts training when it is imported, and runner"
                text += f" processes import it: {guard}"
            raise AppError(text) from None
        if status.error is not None:
            raise AppError(status.error + where)

    # --- supervision ----------------------------------------------------------------------
    async def _supervise(self) -> None:
        assert self._plan is not None
        while True:
            await asyncio.sleep(self._plan.timings.poll_interval_s)
            for worker in list(self._workers):
                death = await self._death(worker)
                if death is not None:
                    try:
                        await self._replace(worker, death)
                    except Exception as error:
                        self._failure = as_failure(error, "the runners cannot be supervised")
                        return

    async def _death(self, worker: _Worker) -> ProcessExit | None:
        """Return how a process has ended; None if it is alive.

        A process whose heartbeats are missing is ended first.
        """
        # Checked before the messages are read, so that the last message is not missed.
        is_dead = not worker.process.is_alive()
        worker.read_status()
        is_silent = not is_dead and worker.is_silent
        if is_silent:
            await asyncio.to_thread(worker.abort)
        return worker.death(is_silent=is_silent) if is_dead or is_silent else None

    async def _requeue(self, dead: _Worker, death: ProcessExit) -> None:
        """End the attempts that a dead process had under way, so that their rollouts are requeued.

        If the store cannot be reached, the attempts end when their leases expire.
        """
        assert self._plan is not None
        dead.read_status()  # `_end` would read an older one later
        try:
            async with open_store(self._plan.store_url) as store:
                for report in (reports := await requeue_attempts(death, store, self._plan.run_id)):
                    log.warning("attempt %s: %s", report.attempt_id, report.message)
            returned = dead.latest.returned + sum(not each.counts for each in reports)
            dead.latest = msgspec.structs.replace(dead.latest, running=0, returned=returned)
        except LightspanError as error:
            log.warning("the attempts of runner %s end with their leases: %s", death.runner, error)

    async def _replace(self, dead: _Worker, death: ProcessExit) -> None:
        timings = dead.plan.timings
        is_quick = clock.monotonic() - dead.started < timings.quick_death_s
        is_useless = is_quick and not death.is_blameless and not dead.latest.claimed
        self._quick_deaths = self._quick_deaths + 1 if is_useless else 0
        log.warning("runner %s %s and is replaced", dead.name, death.how)
        await self._requeue(dead, death)
        self._workers.remove(dead)
        _end([dead])
        self._before += _counts([dead])
        if self._quick_deaths >= timings.max_quick_deaths:
            times = f"{self._quick_deaths} times within {timings.quick_death_s:g} s of starting"
            last = f"(the last one {death.how}); run the app alone to see why"
            raise LightspanError(f"runner processes died {times}, before they ran anything {last}")
        self._workers += await self._start_all([dead.plan.slots])


def shares(slots: int, processes: int) -> list[int]:
    """Divide `slots` among `processes` as evenly as possible; return the slots of each process."""
    return [len(range(number, slots, processes)) for number in range(processes)]


def as_failure(error: Exception, message: str) -> LightspanError:
    """Return `error` if it is a `LightspanError`, else a `LightspanError` with it as the cause.

    Args:
        error: the error.
        message: text with which the message of a new error begins.
    """
    if isinstance(error, LightspanError):
        return error
    failure = LightspanError(f"{message}: {error!r}")
    failure.__cause__ = error
    return failure


def _counts(workers: Sequence[_Worker]) -> Counter[str]:
    return Counter({n: sum(getattr(w.latest, n) for w in workers) for n in WorkerStatus.COUNTS})


def _close_pipes(workers: Sequence[_Worker]) -> None:
    """Close the pipes to the processes. The processes then end, and their attempts are requeued.

    Messages from the processes can still be read.
    """
    for pipe in (worker.parent_pipe for worker in workers):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
            end.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _hash_seed() -> Iterator[None]:
    """Give the processes that are started meanwhile the same hashes of texts.

    Then a set is in the same order in all of them, so that a rollout can be repeated in another
    process. A user's own `PYTHONHASHSEED` is kept.
    """
    own = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = own or "0"
    try:
        yield
    finally:
        if own is None:
            del os.environ["PYTHONHASHSEED"]


def _end(workers: Sequence[_Worker]) -> None:
    _close_pipes(workers)
    start = clock.monotonic()
    for worker in workers:
        deadline = start + worker.plan.timings.end_timeout_s
        # `join` would also wait for child processes that an app has forked.
        while worker.process.is_alive() and clock.monotonic() < deadline:
            time.sleep(0.01)
        if worker.process.is_alive():
            worker.kill()
        worker.read_status()
        worker.parent_pipe.close()
        worker.process.close()


def end_if_imported_by_a_runner() -> None:
    """End this process if it is a runner process that is importing the training script.

    A script without `if __name__ == "__main__":` would start a training in every runner process.
    The parent recognises the exit code and reports the missing line.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(_IMPORTED_EXIT)


def _main(data: bytes, name: str, parent_pipe: Connection, method: str | None) -> None:
    """Run a runner process of this interpreter.

    Args:
        data: the `RunnerPlan` as JSON.
        name: name of the runner.
        parent_pipe: pipe for messages.
        method: start method with which the parent starts child processes; None if it is not set.
    """
    # The default in a spawned process is "spawn"; the app gets the start method of the parent.
    multiprocessing.set_start_method(method, force=True)
    work(msgspec.json.decode(data, type=RunnerPlan), name, parent_pipe)
