"""What an open PostgreSQL store has: two lanes of writers, a reader, and who listens."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import psycopg

from lightspan.stores._sql.connections import OpenDatabase
from lightspan.stores._sql.group_commit import Work
from lightspan_cluster.postgres import schema
from lightspan_cluster.postgres.listener import Listener
from lightspan_cluster.postgres.server import (
    OUT_OF_REACH_S,
    Link,
    Patience,
    Server,
    is_about_to_start,
    is_lost,
    is_low_level,
)
from lightspan_cluster.postgres.tables import PostgresReadTables, PostgresWriteTables
from lightspan_cluster.postgres.writer import WriterThread

T = TypeVar("T")
R = TypeVar("R")

_CLAIM_COST: Final = 32


class PostgresDatabase(OpenDatabase):
    """Up to four connections and their threads, of one process. The reader's is made at once, and
    each other one when it is needed."""

    def __init__(
        self,
        server: Server,
        clock: Callable[[], float] | None,
        on_move: Callable[[], None],
        *,
        create: bool,
    ) -> None:
        self._server = server
        self._on_move = on_move
        moving = PostgresWriteTables(Link(server), clock)
        adding = PostgresWriteTables(Link(server), clock)
        reading = PostgresReadTables(Link(server, self._first(create)), clock)
        super().__init__(moving, adding, reading)
        self._reading = reading.link
        self._is_away = False
        """The reader has waited for the server in vain: the next query does not wait as long."""
        self._mover = WriterThread(moving, on_move, moves=True)
        self._adder = WriterThread(adding, on_move, moves=False)
        self._adds = {
            adding.add_spans,
            adding.add_calls,
            adding.mark_calls,
            adding.put_resources,
            adding.drop_peers,
            self.announce,
        }
        self._listener: Listener | None = None
        self._listening = threading.Lock()

    def _first(self, create: bool) -> psycopg.Connection[object]:
        """A connection to tables of this version. Raises `StoreError`."""
        patience = Patience(OUT_OF_REACH_S)
        while True:
            try:
                db = self._server.connect()
                try:
                    schema.prepare(db, self._server.address, create=create)
                except BaseException:
                    db.close()
                    raise
            except Exception as error:
                if is_about_to_start(error) and patience.pause():
                    continue
                if not is_low_level(error):
                    raise
                raise self._server.explain(error) from error
            return db

    def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> Awaitable[list[R]]:
        if work == self.claim:  # each asks for itself, several times
            cost = max(cost, _CLAIM_COST)
        lane = self._adder if work in self._adds else self._mover
        return lane.submit(work, items, cost)

    def listen(self) -> None:
        """Hear from now on what others say."""
        with self._listening:
            if self._listener is None:
                self._listener = Listener(self._server, self._on_move)

    def _query(self, query: Callable[[], R]) -> R:
        patience = Patience(0.0 if self._is_away else OUT_OF_REACH_S)
        while True:
            try:
                found = query()
            except Exception as error:
                if self._reading.recover(error, patience):
                    continue
                self._is_away = is_lost(error)
                if not is_low_level(error):
                    raise
                raise self._server.explain(error) from error
            self._is_away = False
            return found

    def stop(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        self._read_thread.shutdown()
        self._reading.close()
        self._mover.stop()
        self._adder.stop()
