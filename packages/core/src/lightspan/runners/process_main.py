"""Entry point of a runner process, and the messages between the process and its parent.

The messages are JSON in a single pipe, because the parent may have another version of Python. The
pipe closes when the parent ends, even by `kill -9`, and then the process ends itself. The process
sends heartbeats (`_Parent.report`); the parent ends a process whose heartbeats stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Final

import msgspec

from lightspan import child_processes
from lightspan.capture import context_propagation
from lightspan.errors import LightspanError, StoreUnreachableError
from lightspan.runners.app import App, load_app
from lightspan.runners.loop_watchdog import LoopWatchdog
from lightspan.runners.protocol import FOLDER_VARIABLE, RunnerConfig, RunnerPlan, RunnerSettings
from lightspan.runners.runner import Runner
from lightspan.runners.timings import RunnerTimings
from lightspan.schema import clock
from lightspan.stores import open_store, relay_url, take_credentials
from lightspan.stores.aio import use_real_clock, wait_for_event
from lightspan.stores.credentials import keep_secrets
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

_STUCK_EXIT: Final = 3
"""Exit code of a process that ended itself. Its last `WorkerStatus` has the reason."""
_ORPHANED_EXIT: Final = 4
"""Exit code of a process whose app did not end after the parent was gone."""
_STUCK: Final = "still runs an app whose attempt has ended"
DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError)
"""Exceptions raised for bytes that are not a valid message."""


class WorkerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A message from the parent to a process."""

    runs: list[str] | None = None
    """Ids of the runs to which all claims are limited from now on; None for no change."""
    stop: bool = False
    """Whether to stop claiming attempts, and to end when the attempts under way have ended."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A message from a process to its parent. The first is sent after the import of the app.

    Process and parent may have different versions of lightspan, so fields may only be added, with a
    default.
    """

    error: str | None = None
    """Why the process cannot be a runner; None if it can."""
    beats: bool = False
    """Whether the process sends heartbeats. If it does and they stop, the process is blocked."""
    leaves: str = ""
    """Why the process ends itself to be replaced, if no attempt under way has caused the end; else
    empty. An exit code cannot show this, because an app may call `os._exit` with any code."""
    reason: str = ""
    """Why the process ends itself, if an attempt under way may have caused the end; else empty."""
    claimed: int = 0
    """Number of attempts claimed so far."""
    running: int = 0
    """Number of attempts under way."""
    returned: int = 0
    """Number of attempts whose rollouts were requeued because the process ends."""
    finished: int = 0
    """Number of attempts whose result the store has accepted, without those that were lost."""
    COUNTS: ClassVar = ("claimed", "running", "returned", "finished")
    """The fields that are numbers of attempts, which `Runner` has too."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a process of another interpreter: its plan and the runner's name."""

    plan: RunnerPlan
    name: str


def serve(parent_pipe: Connection) -> None:
    """Run a runner process of another interpreter; read its `Assignment` from `parent_pipe`."""
    try:
        assignment = msgspec.json.decode(parent_pipe.recv_bytes(), type=Assignment)
    except (EOFError, OSError):  # the parent rejected the interpreter
        return
    work(assignment.plan, assignment.name, parent_pipe)


def work(plan: RunnerPlan, name: str, parent_pipe: Connection) -> None:
    """Import the app, send the first status, and run attempts until the process has to end.

    Args:
        plan: configuration of the runner.
        name: name of the runner.
        parent_pipe: pipe for messages; when it closes, the process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # A daemonic process may not start processes, so an app that uses multiprocessing would fail
    # here only. The parent ends the process in any case.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # there may be no stderr
        faulthandler.enable()  # prints the stack at a crash, and when the parent aborts the process
    keep_secrets(plan.store_url, plan.store_secrets)
    sys.path[:] = [*plan.sys_path, *(path for path in sys.path if path not in plan.sys_path)]
    context_propagation.carry()  # before the app starts threads
    if plan.folder and not plan.elsewhere:
        os.environ[FOLDER_VARIABLE] = plan.folder
    try:
        take_credentials(plan.store_url)
        app = load_app(plan.app)
    except LightspanError as error:
        _send(parent_pipe, WorkerStatus(error=str(error)))
        return
    _send(parent_pipe, WorkerStatus())
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        use_real_clock(loop)
        task = loop.create_task(_work(plan, app, name, parent_pipe))
        # A task of the app that raises SystemExit ends the loop too, with all attempts under way,
        # so the loop is run again.
        while not task.done():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_until_complete(task)


async def _work(plan: RunnerPlan, app: App, name: str, parent_pipe: Connection) -> None:
    """Run attempts until the parent commands the process to end, or until an app is stuck."""
    parent = _Parent(parent_pipe, plan.timings)
    if plan.joins:
        await parent.has_decided.wait()
    if parent.has_ended.is_set() or (store := await open_plan_store(plan, parent)) is None:
        return
    shared = {name: getattr(plan, name) for name in RunnerSettings.__struct_fields__}
    relay = relay_url(plan.store_url) if plan.elsewhere else ""
    place = f"{name}-{socket.gethostname()}-{os.getpid()}"
    config = RunnerConfig(**shared, app=plan.app, name=place, has_watchdog=True, relay=relay)
    async with store:
        runner = Runner(store, app, config, parent.report)
        parent.attach(runner)
        async with LoopWatchdog(runner, plan.store_url, parent.report, parent.end):
            await runner.run()
            if runner.stuck:  # its thread or task would block the exit
                parent.end(None)
            parent.report(timeout_s=plan.timings.exit_timeout_s)
            # Tasks and threads that the app has left running may keep the process alive for ever,
            # and a store whose server is away for a minute.
            timer = threading.Timer(plan.timings.exit_timeout_s, _end_process, [0])
            timer.daemon = True
            timer.start()


async def open_plan_store(plan: RunnerPlan, parent: _Parent) -> Store | None:
    """Open the store of `plan`, and try again while its server does not answer.

    The process is ended when it has waited for the time of a lease, or for `quick_death_s` seconds
    if that is longer. If it ended earlier, it would count as a process that died right after its
    start.

    Returns:
        The open store; None if the parent commanded the process to end meanwhile.
    """
    store, start = open_store(plan.store_url), clock.monotonic()
    while True:
        try:
            await store.open()
            return store
        except StoreUnreachableError as error:
            waited_s = clock.monotonic() - start
            if waited_s >= max(plan.lease_s, plan.timings.quick_death_s):
                parent.end(f"it could not open the store for {waited_s:.0f} s: {error}")
            log.warning("waiting for the store: %s", error)
        if await wait_for_event(plan.timings.store_retry_s, parent.has_ended):
            return None


def _end_process(code: int) -> None:
    """End this process at once with exit code `code`, and kill the child processes of the app.

    The child processes could otherwise run for ever and keep stdout and stderr open.
    """
    with contextlib.suppress(Exception):  # the app may have changed anything in multiprocessing
        for child in multiprocessing.active_children():
            child.kill()
        child_processes.kill(child_processes.left_by(os.getpid()))
    os._exit(code)


def _send(parent_pipe: Connection, status: WorkerStatus) -> None:
    with contextlib.suppress(OSError):  # the parent is gone, and this process ends too
        parent_pipe.send_bytes(msgspec.json.encode(status))


class _Parent:
    """Connection to the parent: sends the runner's status and forwards the parent's commands.

    Create it in the runner's event loop. A thread reads the commands, and ends the process when the
    parent has ended.

    Args:
        pipe: pipe for messages.
        timings: timings of the runner.
    """

    def __init__(self, pipe: Connection, timings: RunnerTimings) -> None:
        self.has_decided = asyncio.Event()
        """Set when the parent has named a run, or has commanded the process to end."""
        self.has_ended = asyncio.Event()
        """Set when the process has to end."""
        self._pipe = pipe
        self._timings = timings
        self._loop = asyncio.get_running_loop()
        self._runner: Runner | None = None
        self._runs: list[str] | None = None
        self._lock = threading.Lock()
        self._writable = select.poll()
        self._writable.register(pipe.fileno(), select.POLLOUT)
        threading.Thread(target=self._read, name="lightspan-commands", daemon=True).start()

    def report(self, leaves: str = "", reason: str = "", timeout_s: float = 0.0) -> None:
        """Send the runner's status, from any thread. Do nothing if the pipe stays full.

        Args:
            leaves: why the process ends, if no attempt has caused the end; else empty.
            reason: why the process ends, if an attempt may have caused the end; else empty.
            timeout_s: maximum seconds to wait while the pipe is full, as for the last status.
        """
        with self._lock:  # the last complete status counts when the process dies
            counts: dict[str, Any] = {n: getattr(self._runner, n, 0) for n in WorkerStatus.COUNTS}
            status = WorkerStatus(beats=True, leaves=leaves, reason=reason, **counts)
            # A parent that is busy for minutes must not keep us from extending the leases.
            if self._writable.poll(1000 * timeout_s):
                _send(self._pipe, status)

    def end(self, reason: str | None) -> None:
        """Report why the process ends, and end it at once.

        Args:
            reason: the reason, if an attempt under way may have caused the end. None if an app is
                stuck.
        """
        leaves = "" if reason else _STUCK
        self.report(leaves, reason or "", self._timings.exit_timeout_s)
        _end_process(_STUCK_EXIT)

    def attach(self, runner: Runner) -> None:
        """Report the status of `runner` from now on, and forward the parent's commands to it.

        The latest command is forwarded at once.
        """
        self._runner = runner
        self._apply(WorkerCommand(runs=self._runs, stop=self.has_ended.is_set()))

    def _read(self) -> None:
        # A closed pipe or event loop, or an unreadable message, ends the process.
        with contextlib.suppress(EOFError, OSError, RuntimeError, *DECODE_ERRORS):
            while True:
                command = msgspec.json.decode(self._pipe.recv_bytes(), type=WorkerCommand)
                self._loop.call_soon_threadsafe(self._apply, command)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._abort)
        time.sleep(self._timings.orphan_timeout_s)
        _end_process(_ORPHANED_EXIT)

    def _apply(self, command: WorkerCommand) -> None:
        if command.runs is not None:
            self._runs = command.runs
            if self._runner is not None:
                self._runner.work_for(command.runs)
        if command.stop:
            self.has_ended.set()
            if self._runner is not None:
                self._runner.stop()
        if command.runs or command.stop:
            self.has_decided.set()

    def _abort(self) -> None:
        self._apply(WorkerCommand(stop=True))
        if self._runner is not None:
            self._runner.abort()
