"""What runs inside a runner process, and what it and its parent say to each other.

They talk over one connection, in JSON: the parent may have another version of Python. The
connection is a lifeline too: it ends when the parent does, even by `kill -9`, and the process with
it. A process says every moment that it is well (`_StatusReporter`): one that is silent is ended.
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
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from lightspan import child_processes
from lightspan.capture import context_propagation
from lightspan.errors import LightspanError, StoreUnreachableError
from lightspan.runners.app import App, load_app
from lightspan.runners.crash_recovery import QUICK_S
from lightspan.runners.loop_watchdog import Guard
from lightspan.runners.protocol import RunnerPlan
from lightspan.runners.runner import Runner, RunnerConfig
from lightspan.schema import clock
from lightspan.stores import open_store, relay_url, take_credentials
from lightspan.stores.aio import use_real_clock, wait_for_event
from lightspan.stores.credentials import keep_secrets
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

STUCK_EXIT: Final = 3
"""Exit code of a process that gave itself up; why, it has said (`WorkerStatus`)."""
_STUCK: Final = "holds a stuck app"
_END_S: Final = 8.0
"""How long apps may take to end when the parent is gone: if it is not, it kills us after 10 s."""
_LEAVING_S: Final = 3.0
"""How long a process that has nothing left to do waits for what apps have left behind."""
_STORE_PAUSE_S: Final = 1.0
"""Between two tries to open a store whose server does not answer."""
DAMAGED: Final = (msgspec.MsgspecError, UnicodeDecodeError)
"""What decoding raises where a message is none of ours."""


class WorkerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A message from the parent to a process."""

    runs: list[str] | None = None
    """Work for these from now on."""
    stop: bool = False
    """Claim nothing more, and end with the attempts under way."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A message from a process to its parent; the first one says whether it has the app.

    The two may have different versions of lightspan: fields are only ever added, with a default.
    """

    error: str | None = None
    """Why it cannot work."""
    beats: bool = False
    """It says something every second, or it is not well."""
    leaves: str = ""
    """It ends, to be replaced, for this reason. An exit code does not tell that, because an app may
    call `os._exit` with any."""
    reason: str = ""
    """It ends itself, for this reason, and some attempt that is left may be to blame."""
    claimed: int = 0
    """Attempts so far."""
    running: int = 0
    """Attempts under way."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a process of another interpreter."""

    plan: RunnerPlan
    name: str


def serve(parent_pipe: Connection) -> None:
    """The entry of a process of another interpreter: its plan comes over the parent_pipe."""
    try:
        assignment = msgspec.json.decode(parent_pipe.recv_bytes(), type=Assignment)
    except (EOFError, OSError):  # the parent wants no such interpreter
        return
    work(assignment.plan, assignment.name, parent_pipe)


def work(plan: RunnerPlan, name: str, parent_pipe: Connection) -> None:
    """Import the app, say so, work until the parent_pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # The parent ends us in any case, and a daemonic process may start none of its own: an app that
    # uses multiprocessing would fail here and nowhere else.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr may be none
        faulthandler.enable()  # where it crashed, or kept the GIL until the parent ended it
    keep_secrets(plan.store_url, plan.store_secrets)
    sys.path[:] = [*plan.sys_path, *(path for path in sys.path if path not in plan.sys_path)]
    context_propagation.carry()  # before the app begins workers of its own
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
        task = loop.create_task(_work(plan, app, name, parent_pipe, _StatusReporter(parent_pipe)))
        # A task of the app's own that raises SystemExit keeps it for whoever awaits the task, but
        # asyncio lets it out of the loop as well, past every attempt under way.
        while not task.done():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_until_complete(task)


async def _work(
    plan: RunnerPlan, app: App, name: str, parent_pipe: Connection, voice: _StatusReporter
) -> None:
    """Work until told to end, or until an app is stuck, which ends the process."""
    control = _CommandReader(parent_pipe, asyncio.get_running_loop())
    if plan.joins and not await control.has_runs():
        return
    config = RunnerConfig(
        slots=plan.slots,
        run_id=plan.run_id,
        app=plan.app,
        lease_s=plan.lease_s,
        name=name,
        grace_s=plan.grace_s,
        guarded=True,
        environment=plan.environment,
        relay=relay_url(plan.store_url) if plan.elsewhere else "",
    )
    store = await _opened(plan, control, voice)
    if store is None:
        return
    async with store:
        runner = voice.runner = Runner(store, app, config, voice.say)
        control.lead(runner)
        async with Guard(runner, plan.store_url, voice.say, voice.end):
            await runner.run()
            if runner.stuck:  # waiting for what the app holds on to would hang us
                voice.end(None)
        voice.say()
    # A task or a thread that an app left behind may hold the process for ever.
    leaving = threading.Timer(_LEAVING_S, _end_process, [0])
    leaving.daemon = True
    leaving.start()


async def _opened(
    plan: RunnerPlan, control: _CommandReader, voice: _StatusReporter
) -> Store | None:
    """The store, open; None where the process is to end before somebody answers there.

    A server that starts again is waited for as by a process that works already (`Runner`): for a
    lease, and longer than what counts as a death of the app's (`QUICK_S`).
    """
    store, begun = open_store(plan.store_url), clock.monotonic()
    while True:
        try:
            await store.open()
            return store
        except StoreUnreachableError as error:
            waited_s = clock.monotonic() - begun
            if waited_s >= max(plan.lease_s, QUICK_S):
                voice.end(f"it could not open the store for {waited_s:.0f} s: {error}")
            log.warning("waiting for the store: %s", error)
        if await control.ended_within(_STORE_PAUSE_S):
            return None


def _end_process(code: int) -> None:
    """End this process at once, and those that the app started, as a pool of processes or a
    program is: they would wait for ever, and hold on to our output."""
    with contextlib.suppress(Exception):  # the app may have done anything to multiprocessing
        for child in multiprocessing.active_children():
            child.kill()
        child_processes.kill(child_processes.left_by(os.getpid()))
    os._exit(code)


class _StatusReporter:
    """Says how a runner is; from any thread."""

    runner: Runner | None = None

    def __init__(self, parent_pipe: Connection) -> None:
        self._parent_pipe = parent_pipe
        self._speaking = threading.Lock()
        self._writable = select.poll()
        self._writable.register(parent_pipe.fileno(), select.POLLOUT)

    def say(self, leaves: str = "", reason: str = "") -> None:
        """Say what it has claimed and what is under way, unless nobody listens."""
        runner = self.runner
        with self._speaking:  # whole: what was said last is what holds when the process dies
            word = WorkerStatus(
                beats=True,
                leaves=leaves,
                reason=reason,
                claimed=runner.claimed if runner else 0,
                running=runner.running if runner else 0,
            )
            # A parent that is busy for minutes must not keep us from extending the leases.
            if self._writable.poll(0):
                _send(self._parent_pipe, word)

    def end(self, reason: str | None) -> None:
        """End the process: for this reason, or because an app is stuck."""
        self.say(leaves="" if reason else _STUCK, reason=reason or "")
        _end_process(STUCK_EXIT)


def _send(parent_pipe: Connection, word: WorkerStatus) -> None:
    with contextlib.suppress(OSError):  # the parent is gone, and this process with it
        parent_pipe.send_bytes(msgspec.json.encode(word))


class _CommandReader:
    """Hands the parent's orders to the runner, from a thread; aborts it when the parent is gone."""

    def __init__(self, parent_pipe: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._parent_pipe = parent_pipe
        self._loop = loop
        self._runner: Runner | None = None
        self._runs: list[str] | None = None
        self._ended = False
        self._changed = asyncio.Event()
        threading.Thread(target=self._listen, name="lightspan-parent_pipe", daemon=True).start()

    async def has_runs(self) -> bool:
        """Wait until there is a run to work for; False if the process is to end instead."""
        while not self._runs and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        return not self._ended

    async def ended_within(self, seconds: float) -> bool:
        """Wait so long, or until the process is to end; whether it is."""
        deadline = clock.monotonic() + seconds
        while not self._ended and (left_s := deadline - clock.monotonic()) > 0:
            self._changed.clear()
            await wait_for_event(left_s, self._changed)
        return self._ended

    def lead(self, runner: Runner) -> None:
        """Hand over what was said so far, and all that follows."""
        self._runner = runner
        self._apply()

    def _listen(self) -> None:
        # If the pipe or the loop is closed, or a message cannot be read, nothing else could end
        # this process: it ends by itself.
        with contextlib.suppress(EOFError, OSError, RuntimeError, *DAMAGED):
            while True:
                order = msgspec.json.decode(self._parent_pipe.recv_bytes(), type=WorkerCommand)
                self._loop.call_soon_threadsafe(self._obey, order)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._abort)
        time.sleep(_END_S)
        _end_process(4)  # the app did not let go

    def _obey(self, order: WorkerCommand) -> None:
        if order.runs is not None:
            self._runs = order.runs
        self._ended = self._ended or order.stop
        self._changed.set()
        self._apply()

    def _apply(self) -> None:
        if self._runner is None:
            return
        if self._runs is not None:
            self._runner.work_for(self._runs)
        if self._ended:
            self._runner.stop()

    def _abort(self) -> None:
        self._ended = True
        self._changed.set()
        if self._runner is not None:
            self._runner.abort()
