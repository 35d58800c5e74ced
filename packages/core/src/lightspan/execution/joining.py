"""A runner that is started by hand and joins whatever training asks for its app."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightspan import __version__
from lightspan.checks import check_number
from lightspan.errors import AppError, ConfigError, UnsupportedError
from lightspan.execution import RunnerPlan
from lightspan.execution.local import LocalRunners
from lightspan.execution.peers import Presence, Trainings, disagreement, here, trainings
from lightspan.records import PeerRole, new_id
from lightspan.store import Store
from lightspan.stores import open_store

LOOK_S: Final = 0.5
"""How often a runner looks at the store's trainings."""
TELL_S: Final = 10.0
"""How often it says what it has done, at most."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What `lightspan runner` was asked for."""

    store_url: str
    app: str
    """`module:name`."""
    run_id: str | None = None
    """The only run to work for."""
    slots: int = 8
    processes: int = 1
    isolation: str = "thread"
    app_dirs: tuple[str, ...] = ()
    """Where the app's modules are, beside what is installed."""
    lease_s: float = 30.0
    until_idle_s: float | None = None
    """End after so many seconds without an attempt."""
    stay: bool = False
    """Wait for another training when one is complete."""


async def join(options: JoinOptions, say: Say) -> None:
    """Work until a training that was joined is complete, or until told to end.

    The first SIGINT (Ctrl-C) lets attempts under way end, a second one and SIGTERM give them back.

    Args:
        options: what to do.
        say: where lines for people go.

    Raises:
        AppError: the app is not in this environment.
        ConfigError: options that cannot be honoured; a training whose lightspan speaks another
            protocol. Nothing was claimed then.
        StoreError: the store cannot be used.
    """
    store = open_store(options.store_url)
    if not store.capabilities.multi_process:
        raise UnsupportedError(
            f"store {options.store_url!r} lives in one process: name the store of the training, "
            "such as sqlite:///absolute/path/runs/first/store.db (the trainer prints it)"
        )
    check_number("lease_s", options.lease_s, above=0)
    if options.until_idle_s is not None:
        check_number("until_idle_s", options.until_idle_s, low=0)
    runners = LocalRunners(options.slots, processes=options.processes, isolation=options.isolation)
    await _Joining(options, runners, say).work(store)


class _Joining:
    """One runner's life."""

    def __init__(self, options: JoinOptions, runners: LocalRunners, say: Say) -> None:
        self._options = options
        self._runners = runners
        self._say = say
        self._name = new_id("runner")
        self._interrupts = 0
        self._interrupted = asyncio.Event()
        self._joined: set[str] = set()
        """Runs that were live while this runner was."""
        self._runs: list[str] = []
        self._waiting = ""
        self._told = self._seen = (0, 0)
        self._disagreed: set[str] = set()
        self._told_at = self._busy_at = time.monotonic()

    async def work(self, store: Store) -> None:
        """Until there is nothing to do any more."""
        await self._start()
        try:
            with self._signals():
                while not await self._work_with(store):
                    self._say(f"the store {self._options.store_url} was replaced by another one")
                    await self._runners.stop()
                    await self._start()
                await self._end()
                claimed, back = self._runners.claimed, self._runners.running
        finally:
            await self._runners.stop()
        more = f", given back: {back}" if back else ""
        self._say(f"ended; attempts claimed: {claimed}, finished: {claimed - back}{more}")

    async def _start(self) -> None:
        options = self._options
        plan = RunnerPlan(
            store_url=options.store_url,
            app=options.app,
            lease_s=options.lease_s,
            sys_path=[*options.app_dirs, *sys.path],
            joins=True,
        )
        self._runs = []
        try:
            await self._runners.start(plan)
        except AppError as error:
            raise AppError(
                f"{error}. A runner works in the environment of the app: install there what is "
                f"missing (`{sys.executable} -m pip install …`), or name the folder of the app's "
                "modules with --app-dir"
            ) from error
        self._say(
            f"runner {self._name}: {options.app}, {options.slots} attempts at once, lightspan "
            f"{__version__} of {sys.executable}"
        )

    async def _work_with(self, store: Store) -> bool:
        """Work with the store's file of now; False if another one is there in its place."""
        options, path = self._options, getattr(store, "path", None)
        while path is not None and not path.exists():
            self._wait_for(f"the store {path} to exist")
            if await self._paused() or self._is_idle():
                return True
        file = _identity(path)
        peer = here(
            self._name,
            PeerRole.RUNNER,
            options.app,
            run_id=options.run_id or "",
            slots=options.slots,
        )
        async with store, Presence(store, peer) as presence:
            while _identity(path) == file:
                found = trainings(await store.peers(), options.app, options.run_id)
                if found.foreign and not found.live:
                    await presence.stay()  # for the trainer to see
                    raise ConfigError(disagreement(found.foreign[0]))
                if self._follow(found) or await self._paused() or self._is_idle():
                    return True
                self._runners.check()
                self._tell()
        return False

    def _follow(self, found: Trainings) -> bool:
        """Work for the runs that are live; True if those that were joined are complete."""
        runs = [peer.run_id for peer in found.live]
        complete = {peer.run_id for peer in found.complete}
        for run in [run for run in self._runs if run not in runs]:
            self._say(f"training {run} {_why_over(run, complete)}")
        for peer in found.foreign:
            if peer.run_id not in self._disagreed:
                self._disagreed.add(peer.run_id)
                self._say(f"training {peer.run_id} cannot be joined: {disagreement(peer)}")
        for peer in found.live:
            if peer.run_id not in self._runs:
                self._waiting = ""
                self._say(
                    f"joined training {peer.run_id} (lightspan {peer.lightspan} of {peer.python})"
                )
        if runs != self._runs:
            self._runs = runs
            self._runners.work_for(runs)
        finished = self._joined & complete
        self._joined |= set(runs)
        if runs:
            return False
        if finished and not self._options.stay:
            return True
        others = f" (those that are there ask for {', '.join(found.other_apps)})"
        self._wait_for(
            f"a training of {self._options.app} in {self._options.store_url}"
            f"{others if found.other_apps else ''}"
        )
        return False

    def _wait_for(self, what: str) -> None:
        if what != self._waiting:
            self._waiting = what
            self._say(f"waiting for {what} (Ctrl-C ends)")

    def _tell(self) -> None:
        """Say what was done, now and then."""
        counts = (self._runners.claimed, self._runners.running)
        now = time.monotonic()
        if counts != self._told and now - self._told_at >= TELL_S:
            self._told, self._told_at = counts, now
            claimed, running = counts
            self._say(
                f"attempts claimed: {claimed}, finished: {claimed - running}, under way: {running}"
            )

    def _is_idle(self) -> bool:
        """Whether there was nothing to do for as long as was allowed."""
        counts = (self._runners.claimed, self._runners.running)
        now = time.monotonic()
        if self._runners.running or counts != self._seen:
            self._seen, self._busy_at = counts, now
        limit = self._options.until_idle_s
        return limit is not None and now - self._busy_at >= limit

    async def _paused(self) -> bool:
        """Wait a moment; True if the runner was told to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._interrupted.wait(), LOOK_S)
        return self._interrupted.is_set()

    # --- the end --------------------------------------------------------------------------
    async def _end(self) -> None:
        """Let attempts under way end, unless told to hurry."""
        if self._interrupts and self._runners.running:
            self._say(f"finishing {self._runners.running} attempts; Ctrl-C again gives them back")
        draining = asyncio.create_task(self._runners.drain())
        while not draining.done() and self._interrupts < 2:
            await asyncio.wait([draining], timeout=0.1)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt, 1)
        loop.add_signal_handler(signal.SIGTERM, self._interrupt, 2)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)

    def _interrupt(self, times: int) -> None:
        self._interrupts += times
        self._interrupted.set()


def _why_over(run: str, complete: set[str]) -> str:
    if run in complete:
        return "is complete"
    return "has stopped; it can be resumed"


def _identity(path: Path | None) -> tuple[int, int] | None:
    """Which file is there; None where there is none, or the store is no file."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
