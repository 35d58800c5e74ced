"""How trainers and runners that do not know each other meet in a store.

Each says now and then that it is there, for which app, with which lightspan (`Store.announce`).
Who speaks another protocol is told so before anything is claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from lightspan import __version__
from lightspan.errors import StoreError
from lightspan.runners.foreign_python import mismatch
from lightspan.schema.records import Peer, PeerRole
from lightspan.schema.semconv import PROTOCOL_VERSION
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

ANNOUNCE_S: Final = 5.0
"""How often a peer says that it is there."""
GONE_S: Final = 20.0
"""A peer that is silent this long counts as gone."""


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
    """The message about a peer that speaks another protocol."""
    return mismatch(peer.python, peer.lightspan, peer.protocol)


class Presence:
    """Announces a peer to a store for as long as it is entered.

    Args:
        store: an open store.
        peer: as it is announced.
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
            with contextlib.suppress(StoreError):  # it counts as gone soon without that
                await self._store.withdraw(self._peer.peer_id)

    async def stay(self, **changes: Any) -> None:
        """Announce the peer so, and let that stand when it is gone."""
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
