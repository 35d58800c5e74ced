"""Who hears what other sessions say: that something has moved. A hint; `watch` looks for itself."""

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
"""After which a lost session is made again. Meanwhile `watch` looks now and then."""
_POLL_INTERVAL_S: Final = 0.2
"""How often the thread looks whether it is to end."""


class Listener:
    """A session that listens, and its thread.

    Args:
        server: of the store.
        on_move: called for each thing heard.
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
        """Return when it is to stop; a session that is lost raises."""
        db = self._link.db
        db.execute(f"LISTEN {CHANNEL}".encode())
        self._on_move()  # what was said before nobody has heard
        while not self._stopping.is_set():
            for notice in db.notifies(timeout=_POLL_INTERVAL_S, stop_after=1):
                if notice.payload == self._schema:
                    self._on_move()
