"""The runner that `lightspan runner` starts: it runs attempts for all trainings of one app."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightspan import __version__
from lightspan.errors import (
    AppError,
    ConfigError,
    LightspanError,
    StoreUnreachableError,
    UnsupportedError,
)
from lightspan.runners.crash_recovery import ProcessExit, requeue_attempts
from lightspan.runners.discovery import Presence, make_peer
from lightspan.runners.gateway_probe import GatewayEndpoint
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema import clock
from lightspan.schema.records import Peer, PeerRole, new_id
from lightspan.schema.validation import check_number
from lightspan.stores import open_store, public_url, relay_url
from lightspan.stores.aio import wait_for_event
from lightspan.stores.protocol import Store
from lightspan_cluster.app_sources import source_hashes
from lightspan_cluster.joined_runners import JoinedRunners
from lightspan_cluster.peers import incompatibility, is_compatible, is_present

POLL_INTERVAL_S: Final = 1.0
"""Seconds between two polls of the store's trainings and of the runner's processes."""
PRINT_INTERVAL_S: Final = 10.0
"""Minimum seconds between two printed lines with the numbers of attempts."""
LEAVE_TIMEOUT_S: Final = 1.0
"""Seconds after a signal in which a request to the store may end. The store may be away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The options of the command `lightspan runner`."""

    store_url: str
    app: str
    """The app, as `module:name`."""
    run_id: str | None = None
    """Id of the only run to work for; None for all runs of the app."""
    slots: int = 8
    processes: int = 1
    isolation: str = "thread"
    app_dirs: tuple[str, ...] = ()
    """Folders with the app's modules; installed packages need none."""
    lease_s: float = 30.0
    until_idle_s: float | None = None
    """The runner ends after this many seconds without an attempt; None for no limit."""
    stay: bool = False
    """Whether the runner waits for another training when a training is complete."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "store_url", public_url(self.store_url))


async def join(options: JoinOptions, print_line: Callable[[str], None]) -> None:
    """Run a runner until a training that it joined is complete, or a signal arrives.

    It uses the processes of `JoinedRunners`: if an app blocks, hangs or kills its process, only its
    own attempt fails. At the first SIGINT (Ctrl-C), running attempts may end. At a second SIGINT,
    or at SIGTERM, they are requeued.

    Args:
        options: the options of the command.
        print_line: prints a line for the user.

    Raises:
        AppError: the app cannot be imported in this environment.
        ConfigError: an option is invalid, or the training's lightspan has another protocol version.
        StoreError: the store cannot be used.
        UnsupportedError: the store exists in one process only.
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
    runners = JoinedRunners(options.slots, processes=options.processes, isolation=options.isolation)
    await _Joiner(options, runners, print_line).work(store)


class _Joiner:
    """One run of the command `lightspan runner`, and the training runs for which it works."""

    def __init__(
        self, options: JoinOptions, runners: JoinedRunners, print_line: Callable[[str], None]
    ) -> None:
        self._options = options
        self._runners = runners
        self._print = print_line
        self._name = new_id("runner")
        self._interrupts = 0
        self._draining: asyncio.Task[None] | None = None
        self._interrupted = asyncio.Event()
        self._joined: set[str] = set()
        """Ids of all runs that this runner has worked for."""
        self._runs: list[str] = []
        self._sources: dict[str, str] = {}
        self._waiting = ""
        """What the runner waits for, as last printed; "" if it does not wait."""
        self._printed = self._latest = (0, 0)
        self._printed_at = self._busy_at = clock.monotonic()
        self._problems: set[tuple[str, str]] = set()
        """Runs that cannot be joined, each with its problem, that were printed already."""

    async def work(self, store: Store) -> None:
        """Run attempts until the runner has to end.

        It ends when a training for which it worked is complete, unless `stay` is set. It also ends
        at a signal, and after `until_idle_s` seconds without an attempt.
        """
        await self._start()
        try:
            with self._signals():
                while not await self._until_interrupted(self._work_with(store)):
                    self._print(f"the store {self._options.store_url} was replaced by another one")
                    await self._runners.stop()
                    await self._start()
                await self._end()
        finally:
            await self._runners.stop()
        counts = self._runners.counts
        if self._interrupts > 1 or counts["running"]:
            requeued = await self._give_back()
            counts["returned"] += counts["running"] if requeued is None else requeued
        counts["running"] = 0
        self._print(f"ended; attempts {_describe(counts)}")

    async def _give_back(self) -> int | None:
        """Requeue the attempts of processes that a signal to the process group ended too.

        Returns:
            The number of attempts. None if the store does not answer: the attempts end when their
                leases expire.
        """
        ended = ProcessExit(runner=self._name, how="ended", is_blameless=True)
        with contextlib.suppress(LightspanError, TimeoutError):
            async with (
                asyncio.timeout(LEAVE_TIMEOUT_S),
                open_store(self._options.store_url) as store,
            ):
                return len(await requeue_attempts(ended, store, self._options.run_id))
        return None

    async def _until_interrupted(self, work: Coroutine[Any, Any, bool]) -> bool:
        """Return the result of `work`; return True if a signal ends `work` before.

        After the signal, `work` has a short time to end and is then cancelled: it might otherwise
        wait forever for a store that does not answer.
        """
        task = asyncio.create_task(work)
        interrupted = asyncio.create_task(self._interrupted.wait())
        await asyncio.wait([task, interrupted], return_when=asyncio.FIRST_COMPLETED)
        interrupted.cancel()
        await asyncio.wait([task], timeout=LEAVE_TIMEOUT_S)
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=LEAVE_TIMEOUT_S)
        return True if not task.done() or task.cancelled() else task.result()

    async def _start(self) -> None:
        options = self._options
        plan = RunnerPlan(
            store_url=options.store_url,
            app=options.app,
            lease_s=options.lease_s,
            sys_path=[*options.app_dirs, *sys.path],
            joins=True,
            elsewhere=True,
            prefix=self._name,  # so that `lightspan status` can tell whose attempts are whose
        )
        self._runs = []
        self._sources = source_hashes(options.app, plan.sys_path)
        try:
            await self._runners.start(plan)
        except AppError as error:
            raise AppError(
                f"{error}. A runner works in the environment of the app: install what is missing "
                f"(`{sys.executable} -m pip install …`), or name the folder of the app's modules "
                "with --app-dir"
            ) from error
        self._print(
            f"runner {self._name}: {options.app}, {options.slots} attempts at once, lightspan "
            f"{__version__} of {sys.executable}"
        )

    async def _work_with(self, store: Store) -> bool:
        """Work until the runner should end or the store's file was replaced by another file.

        While the file is missing, or the store's server does not answer, wait.

        Returns:
            True if the runner should end; False if the file was replaced.
        """
        path = getattr(store, "path", None)
        while True:
            if path is not None and not path.exists():
                reason = f"the store {path} to exist"
            else:
                try:
                    return await self._work_in(store, path)
                except StoreUnreachableError as error:
                    reason = f"the store's server: {error}"
            self._print_waiting(reason)
            if await self._should_end():
                return True

    async def _work_in(self, store: Store, path: Path | None) -> bool:
        options, file = self._options, _file_id(path)
        run_id = options.run_id or ""
        role = PeerRole.RUNNER
        peer = make_peer(
            self._name,
            role,
            options.app,
            run_id=run_id,
            slots=options.slots,
            runs=[],
            sources=self._sources,
        )
        async with store, Presence(store, peer) as presence:
            while _file_id(path) == file:
                current = trainings(await store.peers(), options.app, options.run_id)
                if current.incompatible and not current.live:
                    await presence.stay()  # so that the trainer reports it too
                    raise ConfigError(incompatibility(current.incompatible[0]))
                current = await self._without_unreachable(current, presence)
                is_over = self._follow(current)
                await presence.update(runs=list(self._runs))
                if is_over or await self._should_end():
                    return True
                self._runners.check()
                self._print_counts()
        return False

    async def _without_unreachable(self, current: Trainings, presence: Presence) -> Trainings:
        """Return `current` without the trainings whose gateways this machine cannot reach.

        Only trainings in `current.live` that the runner has not joined yet are checked. For an
        unreachable gateway, a line is printed once and the trainer is notified. Nothing is checked
        if the store has a server: the server then forwards the model calls, and has tried the
        gateway itself.
        """
        if relay_url(self._options.store_url):
            return current
        live, problem = [], ""
        for peer in current.live:
            is_new = bool(peer.gateway) and peer.run_id not in self._runs
            if is_new and not await GatewayEndpoint(peer.gateway, "").is_open():
                problem = (
                    f"the gateway {peer.gateway} does not answer on this machine: start the "
                    "trainer with an address of its machine that runners reach, "
                    'Trainer(gateway="HOST") or "HOST:PORT"'
                )
                self._print_problem(peer.run_id, problem)
            else:
                live.append(peer)
        await presence.update(problem="" if live else problem)
        return dataclasses.replace(current, live=tuple(live))

    def _follow(self, current: Trainings) -> bool:
        """Work for the training runs in `current.live`, and print what changed.

        Returns:
            Whether the runner should end: a training that it joined is complete, none is live, and
            `stay` is not set.
        """
        runs = [peer.run_id for peer in current.live]
        complete = {peer.run_id for peer in current.complete}
        for run in [run for run in self._runs if run not in runs]:
            end = "is complete"
            if run not in complete:
                end = "has stopped or cannot be reached; this runner waits, as it can be resumed"
            self._print(f"training {run} {end}")
        for peer in current.incompatible:
            self._print_problem(peer.run_id, incompatibility(peer))
        for peer in current.live:
            if peer.run_id not in self._runs:
                self._waiting = ""
                of = f" of {peer.python}" if peer.python else ""
                self._print(f"joined training {peer.run_id} (lightspan {peer.lightspan}{of})")
        if runs != self._runs:
            self._runs = runs
            self._runners.work_for(runs)
        is_complete = bool(self._joined & complete) and not self._options.stay
        self._joined |= set(runs)
        if not runs and not is_complete:
            others = f" (live trainings have the apps {', '.join(current.other_apps)})"
            self._print_waiting(
                f"a training of {self._options.app} in {self._options.store_url}"
                f"{others if current.other_apps else ''}"
            )
        return not runs and is_complete

    @property
    def _counts(self) -> tuple[int, int]:
        """Return the number of attempts claimed so far, and the number of attempts that run now."""
        return self._runners.counts["claimed"], self._runners.running

    def _print_problem(self, run_id: str, problem: str) -> None:
        if (run_id, problem) not in self._problems:
            self._problems.add((run_id, problem))
            self._print(f"training {run_id} cannot be joined: {problem}")

    def _print_waiting(self, reason: str) -> None:
        if reason != self._waiting:
            self._waiting = reason
            self._print(f"waiting for {reason} (Ctrl-C ends)")

    def _print_counts(self) -> None:
        counts, now = self._counts, clock.monotonic()
        if counts != self._printed and now - self._printed_at >= PRINT_INTERVAL_S:
            self._printed, self._printed_at = counts, now
            under_way = f", under way: {counts[1]}"
            self._print(f"attempts {_describe(self._runners.counts)}{under_way}")

    async def _should_end(self) -> bool:
        """Wait until the next poll; return whether the runner should end.

        It should end after a signal, and after `until_idle_s` without an attempt.
        """
        if await wait_for_event(POLL_INTERVAL_S, self._interrupted):
            return True
        counts, now = self._counts, clock.monotonic()
        if self._runners.running or counts != self._latest:
            self._latest, self._busy_at = counts, now
        limit = self._options.until_idle_s
        return limit is not None and now - self._busy_at >= limit

    # --- the end --------------------------------------------------------------------------
    async def _end(self) -> None:
        """Wait until the running attempts have ended, or until the second SIGINT (Ctrl-C)."""
        if self._interrupts == 1 and self._runners.running:
            self._print(f"finishing {self._runners.running} attempts; Ctrl-C again gives them back")
        draining = self._draining or asyncio.create_task(self._runners.drain())
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
        if self._draining is None:  # at once: a signal to the process group ends the processes too
            self._draining = asyncio.create_task(self._runners.drain())
        self._interrupted.set()


def _describe(counts: Counter[str]) -> str:
    """Return the numbers of attempts (`LocalRunners.counts`) as a text, without those under way.

    An attempt is lost if its result was not accepted, as after the end of its lease, or if it could
    not reach the gateway. Cancelled attempts count as lost too.
    """
    rest = counts["claimed"] - counts["finished"] - counts["returned"] - counts["running"]
    more = {"given back": counts["returned"], "lost or cancelled": max(0, rest)}
    others = "".join(f", {name}: {count}" for name, count in more.items() if count)
    return f"claimed: {counts['claimed']}, finished: {counts['finished']}{others}"


def _file_id(path: Path | None) -> tuple[int, int] | None:
    """Return the device and the inode of a file; None if `path` is None or there is no file.

    They show whether the store's file was replaced. If a run folder is deleted and created again,
    the same path has another store. A runner that kept the old file open would wait forever in a
    store that no trainer uses.
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
    """The training runs in a store, sorted by whether a certain runner can work for them.

    Args:
        live: runs of the runner's app whose trainers are present and compatible.
        complete: runs of the runner's app that are complete.
        incompatible: runs of the runner's app whose present trainers have another protocol version.
        other_apps: the other apps for which trainers are present.
    """

    live: tuple[Peer, ...]
    complete: tuple[Peer, ...]
    incompatible: tuple[Peer, ...]
    other_apps: tuple[str, ...]


def trainings(peers: Sequence[Peer], app: str, run_id: str | None = None) -> Trainings:
    """Sort the training runs of a store by whether a runner can work for them.

    Args:
        peers: all runners and trainers that use the store.
        app: the runner's app, as `module:name`.
        run_id: the only run that the runner works for; None for all runs.
    """
    trainers = [
        peer for peer in peers if peer.role is PeerRole.TRAINER and run_id in (None, peer.run_id)
    ]
    live = [peer for peer in trainers if is_present(peer) and not peer.complete]
    own = [peer for peer in live if peer.app == app]
    return Trainings(
        live=tuple(peer for peer in own if is_compatible(peer)),
        complete=tuple(peer for peer in trainers if peer.app == app and peer.complete),
        incompatible=tuple(peer for peer in own if not is_compatible(peer)),
        other_apps=tuple(sorted({peer.app for peer in live if peer.app != app})),
    )
