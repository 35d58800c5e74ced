"""How trainers and runners that do not know each other meet in a store.

Each says now and then that it is there, for which app, with which lightspan (`Store.announce`).
Who speaks another protocol is told so before anything is claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from lightspan import __version__
from lightspan.conventions import PROTOCOL_VERSION
from lightspan.errors import StoreError
from lightspan.execution import RunnerPlan, Runners
from lightspan.execution.external import ExternalRunners, command
from lightspan.execution.interpreters import mismatch
from lightspan.records import Peer, PeerRole
from lightspan.store import Store

log = logging.getLogger(__name__)

ANNOUNCE_S: Final = 5.0
"""How often a peer says that it is there."""
GONE_S: Final = 20.0
"""A peer that is silent this long counts as gone."""
LOOK_S: Final = 1.0
"""How often a trainer looks who is there."""
REMIND_S: Final = 60.0
"""How often a trainer says that it waits for runners."""


def here(peer_id: str, role: PeerRole, app: str, **fields: Any) -> Peer:
    """This process as a peer."""
    return Peer(
        peer_id=peer_id,
        role=role,
        app=app,
        protocol=PROTOCOL_VERSION,
        lightspan=__version__,
        python=sys.executable,
        **fields,
    )


def is_there(peer: Peer) -> bool:
    """Whether the peer was heard of lately."""
    return peer.silent_s < GONE_S


def speaks(peer: Peer) -> bool:
    """Whether the peer's lightspan understands this one."""
    return peer.protocol == PROTOCOL_VERSION


def disagreement(peer: Peer) -> str:
    """What to tell of a peer that speaks another protocol."""
    return mismatch(peer.python, peer.lightspan, peer.protocol)


class Presence:
    """Says that a peer is there for as long as it is entered.

    Args:
        store: an open store.
        peer: what to say.
    """

    def __init__(self, store: Store, peer: Peer) -> None:
        self._store = store
        self._peer = peer
        self._task: asyncio.Task[None] | None = None
        self._stays = False

    async def __aenter__(self) -> Self:
        await self._store.announce(self._peer)
        self._task = asyncio.create_task(self._repeat(), name="lightspan-presence")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if not self._stays:
            with contextlib.suppress(StoreError):  # it will count as gone soon
                await self._store.withdraw(self._peer.peer_id)

    async def stay(self, **changes: Any) -> None:
        """Say this, and let it stand when the peer is gone."""
        self._stays = True
        self._peer = msgspec.structs.replace(self._peer, **changes)
        await self._store.announce(self._peer)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            try:
                await self._store.announce(self._peer)
            except StoreError as error:
                log.warning("%s cannot say that it is there: %s", self._peer.peer_id, error)


# --- what a trainer sees ----------------------------------------------------------------------
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
    _known: dict[str, Peer] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _alone_since: float | None = None
    _reminded: float | None = None

    async def watch(self, store: Store) -> None:
        """Look for ever."""
        while True:
            try:
                self.look(await store.peers(), time.monotonic())
            except StoreError as error:
                log.warning("who works with the store cannot be seen: %s", error)
            await asyncio.sleep(LOOK_S)

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
        for name in self._known.keys() - joined.keys():
            self.say(f"runner {name} is gone")
        self._known = joined
        if isinstance(self.runners, ExternalRunners):
            self._wait(self.runners, [peer for peer in _runners(peers) if peer not in mine], now)

    def _mine(self, peers: Sequence[Peer]) -> list[Peer]:
        """The runners that are there for this training."""
        ids = ("", self.plan.run_id)
        found = _runners(peers)
        return [peer for peer in found if peer.app == self.plan.app and peer.run_id in ids]

    def _greet(self, mine: Sequence[Peer]) -> dict[str, Peer]:
        """Say who is new; returns those that have joined."""
        for peer in mine:
            if not speaks(peer) and peer.peer_id not in self._told:
                self._told.add(peer.peer_id)
                self.say(f"runner {peer.peer_id} cannot join: {disagreement(peer)}")
        joined = {peer.peer_id: peer for peer in mine if speaks(peer)}
        for name in joined.keys() - self._known.keys():
            peer = joined[name]
            self.say(
                f"runner {name} joined: {peer.slots} attempts at once, lightspan "
                f"{peer.lightspan}, {peer.python}"
            )
        return joined

    def _wait(self, runners: ExternalRunners, others: Sequence[Peer], now: float) -> None:
        if self._known:
            self._alone_since = self._reminded = None
            runners.missing(0.0)
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        runners.missing(now - self._alone_since)
        if self._reminded is not None and now - self._reminded < REMIND_S:
            return
        self._reminded = now
        elsewhere = sorted({peer.app for peer in others})
        seen = f" (those that are there run {', '.join(elsewhere)})" if elsewhere else ""
        self.say(f"waiting for runners{seen}: in the app's environment, `{command(self.plan)}`")


def _runners(peers: Sequence[Peer]) -> list[Peer]:
    """Those that are there."""
    return [peer for peer in peers if peer.role is PeerRole.RUNNER and is_there(peer)]


# --- what a runner sees -----------------------------------------------------------------------
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
