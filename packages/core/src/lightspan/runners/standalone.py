"""The runner of `lightspan runner`: started by hand, it joins trainings that ask for its app."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightspan import __version__
from lightspan.errors import AppError, ConfigError, StoreUnreachableError, UnsupportedError
from lightspan.runners.discovery import Presence, disagreement, here, is_there, speaks
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema import clock
from lightspan.schema.records import Peer, PeerRole, new_id
from lightspan.schema.validation import check_number
from lightspan.stores import open_store, public_url
from lightspan.stores.aio import wait_for_event
from lightspan.stores.protocol import Store

POLL_INTERVAL_S: Final = 0.5
"""How often a runner looks at the store's trainings, at most, and at its processes."""
_MAX_LOOK_S: Final = 5.0
"""Between two looks at the trainings, where nothing has happened for long."""
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "store_url", public_url(self.store_url))


async def join(options: JoinOptions, say: Say) -> None:
    """Work until a training that was joined is complete, or until told to end.

    An app that blocks, hangs or kills its process costs its own attempt, as in a trainer's own
    runners (`LocalRunners`): its processes are these.

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
    await _Joiner(options, runners, say).work(store)


class _Joiner:
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
        self._told_at = self._busy_at = self._changed_at = clock.monotonic()
        self._look_at = self._changed_at
        """When the store is asked for its trainings again."""

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
            elsewhere=True,
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
        """Work with the store's file of now; False if another one is there in its place. A server
        that is away is waited for, as a file that is not there is."""
        while True:
            try:
                return await self._work_at(store)
            except StoreUnreachableError as error:
                self._wait_for(f"the store's server: {error}")
            if await self._paused() or self._is_idle():
                return True

    async def _work_at(self, store: Store) -> bool:
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
            self._look_at = clock.monotonic()
            while _identity(path) == file:
                if clock.monotonic() >= self._look_at:
                    seen = trainings(await store.peers(), options.app, options.run_id)
                    if seen.foreign and not seen.live:
                        await presence.stay()  # for the trainer to see
                        raise ConfigError(disagreement(seen.foreign[0]))
                    if self._follow(seen):
                        return True
                    now = clock.monotonic()
                    self._look_at = now + look_after(now - max(self._busy_at, self._changed_at))
                if await self._paused() or self._is_idle():
                    return True
                self._runners.check()
                self._tell()
        return False

    def _follow(self, seen: Trainings) -> bool:
        """Work for the runs that are live; True if those that were joined are complete."""
        runs = [peer.run_id for peer in seen.live]
        complete = {peer.run_id for peer in seen.complete}
        for run in [run for run in self._runs if run not in runs]:
            over = "is complete" if run in complete else "has stopped; it can be resumed"
            self._say(f"training {run} {over}")
        for peer in seen.foreign:
            if peer.run_id not in self._disagreed:
                self._disagreed.add(peer.run_id)
                self._say(f"training {peer.run_id} cannot be joined: {disagreement(peer)}")
        for peer in seen.live:
            if peer.run_id not in self._runs:
                self._waiting = ""
                of = f" of {peer.python}" if peer.python else ""
                self._say(f"joined training {peer.run_id} (lightspan {peer.lightspan}{of})")
        if runs != self._runs:
            self._runs, self._changed_at = runs, clock.monotonic()
            self._runners.work_for(runs)
        finished = self._joined & complete
        self._joined |= set(runs)
        if runs:
            return False
        if finished and not self._options.stay:
            return True
        others = f" (those that are there ask for {', '.join(seen.other_apps)})"
        self._wait_for(
            f"a training of {self._options.app} in {self._options.store_url}"
            f"{others if seen.other_apps else ''}"
        )
        return False

    @property
    def _counts(self) -> tuple[int, int]:
        """Attempts claimed so far, and those under way."""
        return self._runners.claimed, self._runners.running

    def _wait_for(self, what: str) -> None:
        if what != self._waiting:
            self._waiting = what
            self._say(f"waiting for {what} (Ctrl-C ends)")

    def _tell(self) -> None:
        """Say what was done, now and then."""
        counts, now = self._counts, clock.monotonic()
        if counts != self._told and now - self._told_at >= TELL_S:
            self._told, self._told_at = counts, now
            claimed, running = counts
            self._say(
                f"attempts claimed: {claimed}, finished: {claimed - running}, under way: {running}"
            )

    def _is_idle(self) -> bool:
        """Whether there was nothing to do for as long as was allowed."""
        counts, now = self._counts, clock.monotonic()
        if self._runners.running or counts != self._seen:
            self._seen, self._busy_at = counts, now
        limit = self._options.until_idle_s
        return limit is not None and now - self._busy_at >= limit

    async def _paused(self) -> bool:
        """Wait a moment; True if the runner was told to end."""
        return await wait_for_event(POLL_INTERVAL_S, self._interrupted)

    # --- the end --------------------------------------------------------------------------
    async def _end(self) -> None:
        """Let attempts under way end, unless told to hurry."""
        if self._interrupts == 1 and self._runners.running:
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


def look_after(quiet_s: float) -> float:
    """Seconds until the next look at trainings of which nothing was heard, and for which nothing
    was done, for `quiet_s`: a server has many runners that wait."""
    return max(POLL_INTERVAL_S, min(_MAX_LOOK_S, quiet_s / 20))


def _identity(path: Path | None) -> tuple[int, int] | None:
    """Which file is there; None where there is none, or the store is no file.

    A run folder that is deleted and made again has another store under the same path: whoever still
    has the old file open would wait for ever in a store that nobody else sees.
    """
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True)
class Trainings:
    """The training runs of a store, as a runner sees them.

    Args:
        live: their trainers are there, and ask for the runner's app.
        complete: nothing is left to do.
        foreign: live, but they speak another protocol.
        other_apps: what live trainers ask for beside the runner's app.
    """

    live: tuple[Peer, ...]
    complete: tuple[Peer, ...]
    foreign: tuple[Peer, ...]
    other_apps: tuple[str, ...]


def trainings(peers: Sequence[Peer], app: str, run_id: str | None = None) -> Trainings:
    """What the peers of a store mean for a runner.

    Args:
        peers: of the store.
        app: `module:name` of the runner's app.
        run_id: the only run that it works for; None for any.
    """
    trainers = [peer for peer in peers if peer.role is PeerRole.TRAINER]
    if run_id is not None:
        trainers = [peer for peer in trainers if peer.run_id == run_id]
    mine = [peer for peer in trainers if peer.app == app]
    live = [peer for peer in mine if is_there(peer) and not peer.complete]
    elsewhere = [peer for peer in trainers if peer.app != app and is_there(peer)]
    return Trainings(
        live=tuple(peer for peer in live if speaks(peer)),
        complete=tuple(peer for peer in mine if peer.complete),
        foreign=tuple(peer for peer in live if not speaks(peer)),
        other_apps=tuple(sorted({peer.app for peer in elsewhere if not peer.complete})),
    )
