"""Runners that somebody else starts: `lightspan runner --store … my_app:answer`.

`ExternalRunners` stands for them in a trainer; `RunnerWatch` is what the trainer sees of them, and
of any that join beside its own. Each looks after its own processes (`joiner`); a machine of theirs
that is gone loses its leases, and each attempt there uses up a try.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightspan.errors import LightspanError, StoreError
from lightspan.runners.discovery import disagreement, is_there, speaks
from lightspan.runners.protocol import RunnerPlan, Runners, check_leaves_home
from lightspan.schema import clock
from lightspan.schema.records import Peer, PeerRole
from lightspan.schema.validation import check_number, check_whole
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 1.0
"""How often a trainer looks who is there."""
REMIND_S: Final = 60.0
"""How often a trainer says that it waits for runners."""


class ExternalRunners:
    """No runners of the trainer's own: those that are started by hand, or by a service manager, in
    the app's environment. The trainer says how, and waits for the first one; they may come and go.

    Args:
        slots: attempts at once that are expected of them all; `dev` reports it.
        timeout_s: seconds without any runner after which training stops; None waits for ever.
    """

    def __init__(self, slots: int = 8, *, timeout_s: float | None = None) -> None:
        check_whole("slots", slots, 1)
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, above=0)
        self.slots = slots
        self.timeout_s = timeout_s
        self._plan: RunnerPlan | None = None
        self._missing_s = 0.0

    async def start(self, plan: RunnerPlan) -> None:
        """Raises `AppError` if no other program could import the app."""
        check_leaves_home(plan.app)
        self._plan = plan
        self._missing_s = 0.0

    async def stop(self) -> None:
        """Nothing to do: whoever started the runners ends them, or they end with the training."""

    def missing(self, seconds: float) -> None:
        """Take note for how long there has been no runner; 0 if there is one."""
        self._missing_s = seconds

    def check(self) -> None:
        """Raises `LightspanError` if nobody came in time."""
        if self.timeout_s is not None and self._missing_s > self.timeout_s:
            assert self._plan is not None
            raise LightspanError(
                f"no runner for {self._missing_s:.0f} s: start one in the app's environment, "
                f"`{command(self._plan)}`, and go on with resume=True"
            )


def command(plan: RunnerPlan) -> str:
    """The command that starts a runner, for the app's environment."""
    return shlex.join(["lightspan", "runner", "--store", plan.store_url, plan.app])


@dataclass(slots=True)
class RunnerWatch:
    """Tells a trainer's user which runners have joined, which cannot, and what is waited for.

    Args:
        plan: of the trainer's runners.
        runners: the trainer's own.
        say: where lines go.
    """

    plan: RunnerPlan
    runners: Runners
    say: Callable[[str], None]
    _joined: dict[str, Peer] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)
    """Runners that speak another protocol; each is told of once."""
    _alone_since: float | None = None
    _reminded: float | None = None

    async def watch(self, store: Store) -> None:
        """Look at the store's peers for as long as this is not cancelled."""
        while True:
            try:
                self.look(await store.peers(), clock.monotonic())
            except StoreError as error:
                log.warning("who works with the store cannot be seen: %s", error)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def end(self, store: Store) -> None:
        """Say who has come since the last look: a run may be over within a second."""
        with contextlib.suppress(StoreError):
            self._greet(self._mine(await store.peers()))

    def look(self, peers: Sequence[Peer], now: float) -> None:
        """Say what has changed.

        Args:
            peers: of the store.
            now: seconds, of a clock that never goes back.
        """
        mine = self._mine(peers)
        joined = self._greet(mine)
        for name in self._joined.keys() - joined.keys():
            self.say(f"runner {name} is gone")
        self._joined = joined
        if isinstance(self.runners, ExternalRunners):
            self._wait(self.runners, [peer for peer in _runners(peers) if peer not in mine], now)

    def _mine(self, peers: Sequence[Peer]) -> list[Peer]:
        """The runners that are there for this training."""
        ids = ("", self.plan.run_id)
        runners = _runners(peers)
        return [peer for peer in runners if peer.app == self.plan.app and peer.run_id in ids]

    def _greet(self, mine: Sequence[Peer]) -> dict[str, Peer]:
        """Say who is new; returns those that have joined."""
        for peer in mine:
            if not speaks(peer) and peer.peer_id not in self._refused:
                self._refused.add(peer.peer_id)
                self.say(f"runner {peer.peer_id} cannot join: {disagreement(peer)}")
        joined = {peer.peer_id: peer for peer in mine if speaks(peer)}
        for name in joined.keys() - self._joined.keys():
            peer = joined[name]
            self.say(
                f"runner {name} joined: {peer.slots} attempts at once, lightspan "
                f"{peer.lightspan}, {peer.python}"
            )
        return joined

    def _wait(self, runners: ExternalRunners, others: Sequence[Peer], now: float) -> None:
        if self._joined:
            self._alone_since = self._reminded = None
            runners.missing(0.0)
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        runners.missing(now - self._alone_since)
        if self._reminded is not None and now - self._reminded < REMIND_S:
            return
        self._reminded = now
        elsewhere = sorted({peer.app for peer in others})
        others_run = f" (those that are there run {', '.join(elsewhere)})" if elsewhere else ""
        self.say(
            f"waiting for runners{others_run}: in the app's environment, `{command(self.plan)}`"
        )


def _runners(peers: Sequence[Peer]) -> list[Peer]:
    """The runners among the peers that are there."""
    return [peer for peer in peers if peer.role is PeerRole.RUNNER and is_there(peer)]
