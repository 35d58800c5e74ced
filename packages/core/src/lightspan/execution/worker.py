"""What runs inside a runner process, and what it and its parent say to each other.

They talk over one connection, in JSON: the parent may have another version of Python. The
connection is a lifeline too: it ends when the parent does, even by `kill -9`, and the process
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from lightspan.app import App, load_app
from lightspan.errors import LightspanError
from lightspan.execution import RunnerPlan
from lightspan.runner import Runner, RunnerConfig
from lightspan.stores import open_store

STUCK_EXIT: Final = 3
"""Exit code of a process that was given up because a sync app ran past its limit."""
_DAMAGED: Final = (msgspec.MsgspecError, UnicodeDecodeError)
"""What decoding raises of a message that is none of ours."""
REPORT_S: Final = 0.5
"""How often a process that joins says what it has claimed."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent says."""

    runs: list[str] | None = None
    """Work for these from now on."""
    stop: bool = False
    """Claim nothing more, and end with the attempts under way."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What the process says: first whether it has the app."""

    error: str | None = None
    """Why it cannot work."""
    claimed: int = 0
    """Attempts so far."""
    running: int = 0
    """Attempts under way."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of another interpreter is told first."""

    plan: RunnerPlan
    name: str


def serve(lifeline: Connection) -> None:
    """The entry of a process of another interpreter: its plan comes over the lifeline."""
    try:
        told = msgspec.json.decode(lifeline.recv_bytes(), type=Assignment)
    except (EOFError, OSError):  # the parent wants no such interpreter
        return
    work(told.plan, told.name, lifeline)


def work(plan: RunnerPlan, name: str, lifeline: Connection) -> None:
    """Import the app, say so, work until the lifeline closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # the parent ends us in any case; as a daemon an app could not use multiprocessing
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    sys.path[:] = [*plan.sys_path, *(path for path in sys.path if path not in plan.sys_path)]
    try:
        app = load_app(plan.app)
    except LightspanError as error:
        _say(lifeline, Word(error=str(error)))
        return
    _say(lifeline, Word())
    if asyncio.run(_work(plan, app, name, lifeline)):
        os._exit(STUCK_EXIT)  # a thread of the app holds on; waiting for it would hang us


async def _work(plan: RunnerPlan, app: App, name: str, lifeline: Connection) -> bool:
    """Work; True if the app is stuck."""
    control = _Control(lifeline, asyncio.get_running_loop())
    if plan.joins and not await control.has_runs():
        return False
    config = RunnerConfig(
        slots=plan.slots,
        run_id=plan.run_id,
        app=plan.app,
        lease_s=plan.lease_s,
        name=name,
        environment=plan.environment,
    )
    async with open_store(plan.store_url) as store:
        runner = Runner(store, app, config)
        control.lead(runner)
        telling = asyncio.create_task(_tell(runner, lifeline)) if plan.joins else None
        await runner.run()
        if telling is not None:
            telling.cancel()
            _say(lifeline, Word(claimed=runner.claimed))
        return runner.stuck


async def _tell(runner: Runner, lifeline: Connection) -> None:
    """Say what was claimed whenever that has changed."""
    said = Word()
    while True:
        await asyncio.sleep(REPORT_S)
        word = Word(claimed=runner.claimed, running=runner.running)
        if word != said:
            _say(lifeline, word)
            said = word


def _say(lifeline: Connection, word: Word) -> None:
    with contextlib.suppress(OSError):  # the parent is gone, and this process with it
        lifeline.send_bytes(msgspec.json.encode(word))


class _Control:
    """Hands the parent's orders to the runner, from a thread; aborts it when the parent is gone."""

    def __init__(self, lifeline: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._lifeline = lifeline
        self._loop = loop
        self._runner: Runner | None = None
        self._runs: list[str] | None = None
        self._ended = False
        self._told = asyncio.Event()
        threading.Thread(target=self._listen, name="lightspan-lifeline", daemon=True).start()

    async def has_runs(self) -> bool:
        """Wait until there is a run to work for; False if the process is to end instead."""
        while not self._runs and not self._ended:
            self._told.clear()
            await self._told.wait()
        return not self._ended

    def lead(self, runner: Runner) -> None:
        """Hand over what was said so far, and all that follows."""
        self._runner = runner
        self._apply()

    def _listen(self) -> None:
        # It is closed, or the loop is, or what came is no order: nobody could end this process.
        with contextlib.suppress(EOFError, OSError, RuntimeError, *_DAMAGED):
            while True:
                order = msgspec.json.decode(self._lifeline.recv_bytes(), type=Order)
                self._loop.call_soon_threadsafe(self._obey, order)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._abort)
        time.sleep(8)
        os._exit(4)  # the app did not let go

    def _obey(self, order: Order) -> None:
        if order.runs is not None:
            self._runs = order.runs
        self._ended = self._ended or order.stop
        self._told.set()
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
        self._told.set()
        if self._runner is not None:
            self._runner.abort()
