"""Who hears what other sessions say: that something has moved. A hint; `watch` looks for itself."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Final

import psycopg

from lightspan.errors import StoreError
from lightspan.stores.postgres.server import Link, Server
from lightspan.stores.postgres.tables import CHANNEL

_AGAIN_S: Final = 1.0
"""After which a lost session is made again. Meanwhile `watch` looks now and then."""


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
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, name="lightspan-store-listen", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._end.close()
        self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            with contextlib.suppress(psycopg.Error, OSError, StoreError):
                going = self._listen()
            self._link.close()
            going = going and not self._is_over(_AGAIN_S)
        self._ended.close()

    def _listen(self) -> bool:
        """Until the session is lost, which raises, or it is over: False."""
        db = self._link.db
        db.execute(f"LISTEN {CHANNEL}".encode())
        self._on_move()  # what was said before nobody has heard
        while not self._is_over(None, db.fileno()):
            said = {notice.payload for notice in db.notifies(timeout=0)}
            if self._schema in said:
                self._on_move()
        return False

    def _is_over(self, timeout_s: float | None, also: int | None = None) -> bool:
        """Wait for the end, or for the other one; True at the end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ended, selectors.EVENT_READ, True)
            if also is not None:
                selector.register(also, selectors.EVENT_READ, False)
            return any(key.data for key, _ in selector.select(timeout_s))
