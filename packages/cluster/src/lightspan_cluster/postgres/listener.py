"""Receives notifications of other sessions that the status of a rollout has changed.

A notification may be lost, so a store's `watch` polls too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

import psycopg

from lightspan.errors import StoreError
from lightspan_cluster.postgres.server import Link, Server
from lightspan_cluster.postgres.tables import CHANNEL

_RETRY_S: Final = 1.0
"""Seconds after which a lost session is opened again. In the meantime the store only polls."""
_POLL_INTERVAL_S: Final = 0.2
"""Seconds between two checks whether `stop` was called."""


class Listener:
    """A session that receives notifications, and its thread.

    Args:
        server: the store's server.
        on_move: called for each notification about the store's schema.
    """

    def __init__(self, server: Server, on_move: Callable[[], None]) -> None:
        self._link = Link(server)
        self._schema = server.address.schema
        self._on_move = on_move
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="lightspan-store-listen", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(psycopg.Error, OSError, StoreError):
                self._listen()
            self._link.close()
            self._stopping.wait(_RETRY_S)

    def _listen(self) -> None:
        """Receive notifications until `stop` is called.

        An error is raised if the connection is lost.
        """
        db = self._link.db
        db.execute(f"LISTEN {CHANNEL}".encode())
        self._on_move()  # earlier notifications were missed
        while not self._stopping.is_set():
            for notice in db.notifies(timeout=_POLL_INTERVAL_S, stop_after=1):
                if notice.payload == self._schema:
                    self._on_move()
