"""Runners that the user starts: `lightspan runner --store … my_app:answer`.

`ExternalRunners` represents them in a trainer, and `RunnerWatch` prints which runners join the
training. Each runner supervises its own processes (`standalone`). If the machine of a runner is
lost, its attempts are given up after a time limit (the lease), and count as a try of their
rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from lightspan.errors import LightspanError, StoreError
from lightspan.runners.discovery import GONE_S
from lightspan.runners.protocol import RunnerPlan, check_importable
from lightspan.schema import clock
from lightspan.schema.records import Peer, PeerRole
from lightspan.schema.validation import check_number, check_whole
from lightspan.stores.protocol import Store
from lightspan_cluster.app_sources import difference, source_hashes
from lightspan_cluster.peers import is_present, problem_of

log = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 1.0
"""Seconds between two polls of the store's peers."""
JOIN_S: Final = 10.0
"""Seconds for which a runner that is there may take to join."""
REMIND_S: Final = 60.0
"""Seconds between two printed lines that runners are missing."""
MAX_CLOCK_ERROR_S: Final = 5.0
"""Maximum difference between a runner's clock and the trainer's of which nothing is printed."""
CLOCK_CHECKS: Final = 3
"""Number of announcements by which the clocks are compared."""


class ExternalRunners:
    """Runners that are started by hand, or by a service manager, in the app's environment.

    The trainer starts no runner. It prints the command that starts one, and waits until a runner
    has joined. Runners may join and leave at any time.

    Args:
        slots: expected number of concurrent attempts of all runners together; `dev` reports it.
        timeout_s: training fails after this many seconds without a runner; None for no limit.
    """

    def __init__(self, slots: int = 8, *, timeout_s: float | None = None) -> None:
        check_whole("slots", slots, 1)
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, above=0)
        self.slots = slots
        self.timeout_s = timeout_s
        self.missing_s = 0.0
        """Seconds for which there has been no runner; 0 while there is one. `RunnerWatch` sets
        it."""
        self.is_needed = True
        """Whether the training has no other runners, so that the user is reminded to start one."""
        self.sources: dict[str, str] = {}
        """Hashes of the app's modules on this machine (`Peer.sources`); empty before `start`."""
        self._plan: RunnerPlan | None = None

    @classmethod
    def beside(cls, plan: RunnerPlan) -> Self:
        """Return an object whose `watch` prints which runners join a training with own runners.

        Args:
            plan: configuration of the training's own runners.
        """
        runners = cls()
        runners.is_needed, runners._plan = False, plan
        runners.sources = source_hashes(plan.app, plan.sys_path)
        return runners

    async def start(self, plan: RunnerPlan) -> None:
        """Check that runners can import the app. Store `plan`, which `watch` uses.

        Raises:
            AppError: runners cannot import the app.
        """
        check_importable(plan.app)
        self._plan = plan
        self.sources = source_hashes(plan.app, plan.sys_path)
        self.missing_s = 0.0

    async def watch(self, store: Store, print_line: Callable[[str], None]) -> None:
        """Print which runners join and leave, until cancelled.

        While there is no runner, remind the user.

        Args:
            store: the store in which runners announce themselves.
            print_line: prints a line.
        """
        assert self._plan is not None
        watch = RunnerWatch(self._plan, self, print_line)
        while True:
            try:
                watch.update(await store.peers(), clock.monotonic())
            except StoreError as error:
                if self.is_needed:
                    log.warning("the store's runners cannot be read: %s", error)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def stop(self) -> None:
        """Do nothing: runners end when the training is complete, or when the user ends them."""

    def check(self) -> None:
        """Raise `LightspanError` if there has been no runner for more than `timeout_s`."""
        if self.timeout_s is not None and self.missing_s > self.timeout_s:
            assert self._plan is not None
            raise LightspanError(
                f"no runner for {self.missing_s:.0f} s: start one {self.advice(self._plan)}, and "
                "go on with resume=True"
            )

    def command(self, plan: RunnerPlan) -> str:
        """Return the shell command that starts a runner, for the user to run."""
        return shlex.join(["lightspan", "runner", "--store", plan.store_url, plan.app])

    def advice(self, plan: RunnerPlan) -> str:
        """Return, for messages, where and by which command a runner is started."""
        return f"in the app's environment, `{self.command(plan)}`"


@dataclass(slots=True)
class RunnerWatch:
    """Prints which runners join a training, which are incompatible, and when no runner is left.

    Also prints, once per runner, that its clock differs from the clock of the trainer's machine, or
    that its app is another version than on the trainer's machine or of an earlier runner.

    Args:
        plan: the app and the training run for which runners are needed.
        runners: the trainer's runners. Their `missing_s` is set to the seconds without a runner.
        print_line: prints a line.
    """

    plan: RunnerPlan
    runners: ExternalRunners
    print_line: Callable[[str], None]
    _joined: dict[str, Peer] = field(default_factory=dict)
    _rejected: dict[str, str] = field(default_factory=dict)
    """Name of a runner that cannot join → why, as printed last."""
    _ahead: dict[str, dict[float, float]] = field(default_factory=dict)
    """Name of a runner → time of an announcement by its clock → how many seconds its clock seemed
    to be ahead then."""
    _alone_since: float | None = None
    _reminded: float | None = None

    def update(self, peers: Sequence[Peer], now: float) -> None:
        """Print which runners joined or left since the last call.

        Set `runners.missing_s` to the number of seconds for which there has been no runner.

        Args:
            peers: all runners and trainers that use the store.
            now: current time of a monotonic clock, in seconds.
        """
        joined = self._joined_of(peers)
        for name in self._joined.keys() - joined.keys():
            self.print_line(f"runner {name} is gone")
        self._joined = joined
        if joined or not self.runners.is_needed:
            self._alone_since = self._reminded = None
            self.runners.missing_s = 0.0
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        self.runners.missing_s = now - self._alone_since
        present = [peer for peer in peers if _is_runner(peer)]
        own = [peer for peer in present if is_runner_of(self.plan, peer)]
        if any(not problem_of(peer) for peer in own) and self.runners.missing_s < JOIN_S:
            return  # it is trying the gateway
        if self._reminded is None or now - self._reminded >= REMIND_S:
            self._reminded = now
            apps = sorted({peer.app for peer in present if peer not in own})
            others = f" (those that are there run {', '.join(apps)})" if apps else ""
            if problems := {problem: p.peer_id for p in own if (problem := problem_of(p))}:
                reasons = (f"runner {name} cannot join: {why}" for why, name in problems.items())
                others = f" ({'; '.join(reasons)})"
            self.print_line(f"waiting for runners{others}: {self.runners.advice(self.plan)}")

    def _joined_of(self, peers: Sequence[Peer]) -> dict[str, Peer]:
        """Return the runners that work for this training, by name, and print the new ones.

        A runner that cannot work for the training, such as one with another protocol version, is
        left out and printed once.

        Args:
            peers: all runners and trainers that use the store.
        """
        joined = {}
        for peer in (peer for peer in peers if is_runner_of(self.plan, peer)):
            name = peer.peer_id
            if problem := problem_of(peer):
                if self._rejected.get(name) != problem:
                    self._rejected[name] = problem
                    self.print_line(f"runner {name} cannot join: {problem}")
                continue
            if peer.runs is not None and self.plan.run_id not in peer.runs:
                continue  # it has not tried the gateway
            self._rejected.pop(name, None)
            self._check_clock(peer)
            joined[name] = peer
            if name not in self._joined:
                more = "" if self.runners.is_needed else " more"
                self.print_line(
                    f"runner {name} joined: {peer.slots}{more} attempts at once, lightspan "
                    f"{peer.lightspan}, {peer.python}"
                )
                self._check_sources(peer, {**self._joined, **joined})
        return joined

    def _check_sources(self, peer: Peer, others: dict[str, Peer]) -> None:
        """Print that the app of a new runner differs from this machine's or another runner's.

        Args:
            peer: the runner.
            others: the runners that have joined, by name.
        """
        versions = {"this machine": self.runners.sources}
        versions |= {f"runner {name}": other.sources for name, other in others.items()}
        if text := difference(f"runner {peer.peer_id}", peer.sources, versions):
            self.print_line(text)

    def _check_clock(self, peer: Peer) -> None:
        """Compare the clock of a runner with the trainer's, at its first few announcements.

        A runner seems to be behind by the time that its announcement takes. So the largest of
        several differences counts.
        """
        ahead = self._ahead.setdefault(peer.peer_id, {})
        if not peer.clock or len(ahead) == CLOCK_CHECKS:
            return
        ahead[peer.clock] = max(
            peer.clock + peer.silent_s - clock.now(), ahead.get(peer.clock, -math.inf)
        )
        seconds = max(ahead.values())
        if len(ahead) == CLOCK_CHECKS and abs(seconds) > MAX_CLOCK_ERROR_S:
            self.print_line(
                f"the clock of runner {peer.peer_id} is {abs(seconds):.0f} s "
                f"{'ahead of' if seconds > 0 else 'behind'} this machine's: times of its spans in "
                "inspect and exports are off by as much, and air= places tool calls less exactly; "
                "set both clocks, as by NTP"
            )


def is_runner_of(plan: RunnerPlan, peer: Peer, within_s: float = GONE_S) -> bool:
    """Return whether `peer` is a runner that is present and works for the training of `plan`.

    Args:
        plan: the app and the training run.
        peer: a runner or trainer that has announced itself in the store.
        within_s: maximum seconds since the last announcement of a runner that is present.
    """
    is_of_plan = peer.app == plan.app and peer.run_id in ("", plan.run_id)
    return is_of_plan and _is_runner(peer, within_s)


def _is_runner(peer: Peer, within_s: float = GONE_S) -> bool:
    # a server's check of its store announces one of no app
    return peer.role is PeerRole.RUNNER and bool(peer.app) and is_present(peer, within_s)
