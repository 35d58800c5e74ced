"""The connections of an open PostgreSQL store: two writers, a reader and a listener."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from lightspan.stores._sql.connections import OpenDatabase
from lightspan.stores._sql.group_commit import Work
from lightspan_cluster.postgres import schema
from lightspan_cluster.postgres.listener import Listener
from lightspan_cluster.postgres.server import (
    Connection,
    Link,
    Retry,
    Server,
    is_connection_lost,
    is_starting,
    needs_explanation,
)
from lightspan_cluster.postgres.tables import PostgresReadTables, PostgresWriteTables
from lightspan_cluster.postgres.writer import WriterThread

T = TypeVar("T")
R = TypeVar("R")

_CLAIM_COST: Final = 32


class PostgresDatabase(OpenDatabase):
    """The connections of one process to a store's database, at most four, each with its own thread.

    The reader's connection is opened at once. Each other connection is opened when it is first
    needed.

    Args:
        server: the store's server.
        clock: a clock for tests; None for the server's clock.
        on_move: called when the status of a rollout may have changed.
        create: whether to create the tables if there are none.
    """

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
        reading = PostgresReadTables(Link(server, self._connect(create)), clock)
        super().__init__(moving, adding, reading)
        self._reading = reading.link
        self._is_unreachable = False
        """Whether the last query waited in vain for the server. If so, the next query does not
        wait."""
        self._is_closing = False
        self._mover = WriterThread(moving, on_move, moves=True)
        self._adder = WriterThread(adding, on_move, moves=False)
        self._additions = {
            adding.add_spans,
            adding.add_calls,
            adding.mark_calls,
            adding.add_images,
            adding.put_resources,
            adding.drop_peers,
            self.announce,
        }
        self._listener: Listener | None = None
        self._lock = threading.Lock()

    def _connect(self, create: bool) -> Connection:
        """Open the reader's connection; create the tables, or check their version.

        Raises:
            StoreError: the server cannot be reached, or the tables cannot be used.
        """
        retry = Retry(self._server.timings.database_retry_s)
        while True:
            try:
                db = self._server.connect()
                try:
                    schema.prepare(
                        db,
                        self._server.address,
                        create=create,
                        upgrade=not self._server.read_only,
                    )
                except BaseException:
                    db.close()
                    raise
                return db
            except Exception as error:
                if is_starting(error) and retry.pause():
                    continue
                if not needs_explanation(error):
                    raise
                raise self._server.explain(error) from error

    def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> Awaitable[list[R]]:
        if work == self.claim:  # each claim runs several queries
            cost = max(cost, _CLAIM_COST)
        writer = self._adder if work in self._additions else self._mover
        return writer.submit(work, items, cost)

    def listen(self) -> None:
        """Start to receive other processes' notifications about changes of rollouts. Idempotent."""
        with self._lock:
            if self._listener is None:
                self._listener = Listener(self._server, self._on_move)

    def _query(self, query: Callable[[], R]) -> R:
        retry = Retry(
            0.0 if self._is_unreachable else lambda: self._server.retry_s(self._is_closing)
        )
        while True:
            try:
                result = query()
            except Exception as error:
                if self._reading.recover(error, retry):
                    continue
                self._is_unreachable = is_connection_lost(error)
                if not needs_explanation(error):
                    raise
                raise self._server.explain(error) from error
            self._is_unreachable = False
            return result

    def stop(self) -> None:
        self._is_closing = True
        if self._listener is not None:
            self._listener.stop()
        self._read_thread.shutdown()
        self._reading.close()
        self._mover.stop()
        self._adder.stop()
