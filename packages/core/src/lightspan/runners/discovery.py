"""Announce trainers and runners in a store, so that they find each other.

Both are *peers*. An announcement (`Store.announce`) names the peer's app and its version of
lightspan. A peer with another protocol version is rejected before any attempt is claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from lightspan import __version__
from lightspan.errors import ConfigError, StoreError
from lightspan.schema import clock
from lightspan.schema.records import Peer, PeerRole
from lightspan.schema.semconv import PROTOCOL_VERSION
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

GONE_S: Final = 20.0
"""A peer counts as gone if it has not announced itself for this many seconds."""
_ANNOUNCE_INTERVAL_S: Final = 5.0
"""Seconds between two announcements of a peer."""
_WITHDRAW_TIMEOUT_S: Final = 2.0
"""Seconds for a withdrawal. A store that is away must not keep a process from ending."""


def make_peer(peer_id: str, role: PeerRole, app: str, **fields: Any) -> Peer:
    """Return the description of this process as a peer, that is, a trainer or runner.

    Args:
        peer_id: id of the peer.
        role: trainer or runner.
        app: reference of the app.
        fields: further fields of `Peer`.
    """
    return Peer(
        peer_id=peer_id,
        role=role,
        app=app,
        protocol=PROTOCOL_VERSION,
        lightspan=__version__,
        python=sys.executable,
        **fields,
    )


def place_of(folder: Path) -> str:
    """Return the field `place` of a trainer in `folder` on this machine."""
    return f"{socket.gethostname()}:{folder.resolve()}"


async def refuse_elsewhere(store: Store, run_id: str, place: str) -> None:
    """Raise `ConfigError` if another trainer of the run is live, such as of a copied folder.

    The lock of a folder has ended with the earlier trainer at the same place.
    """
    for peer in await store.peers():
        is_trainer = peer.role is PeerRole.TRAINER and peer.run_id == run_id and not peer.complete
        if is_trainer and peer.place not in ("", place) and peer.silent_s < GONE_S:
            raise ConfigError(
                f"training {run_id} is live at {peer.place}, seen {peer.silent_s:.0f} s ago: stop "
                f"it there; if it was killed, wait for {GONE_S:g} s"
            )


class Presence:
    """Context manager that announces a trainer or runner in a store while the block runs.

    Args:
        store: an open store.
        peer: description of the trainer or runner.
    """

    def __init__(self, store: Store, peer: Peer) -> None:
        self._store = store
        self._peer = peer
        self._task: asyncio.Task[None] | None = None
        self._stays = False

    async def __aenter__(self) -> Self:
        await self._announce()
        self._task = asyncio.create_task(self._repeat(), name="lightspan-presence")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._stays:
            # If the withdrawal fails, the announcement expires soon.
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_WITHDRAW_TIMEOUT_S):
                    await self._store.withdraw(self._peer.peer_id)

    async def stay(self, **changes: Any) -> None:
        """Announce the trainer or runner with changed fields; do not withdraw this after the block.

        Args:
            changes: fields of `Peer` with their new values.
        """
        self._stays = True
        await self.update(**changes)

    async def update(self, **changes: Any) -> None:
        """Announce the trainer or runner again, if a field changes or `stay` was called.

        Args:
            changes: fields of `Peer` with their new values.
        """
        before, self._peer = self._peer, msgspec.structs.replace(self._peer, **changes)
        if self._stays or self._peer != before:
            await self._announce()

    async def _announce(self) -> None:
        await self._store.announce(msgspec.structs.replace(self._peer, clock=clock.now()))

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(_ANNOUNCE_INTERVAL_S)
            try:
                await self._announce()
            except StoreError as error:
                log.warning("%s cannot be announced: %s", self._peer.peer_id, error)
