"""MemoryStore: a store in this process's memory, for tests, dry runs and notebooks.

It keeps the tables of a SQLite store in a SQLite database in memory, so it moves and answers
exactly as a store in a file does.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightspan.errors import StoreError
from lightspan.schema import clock as machine
from lightspan.stores._sql.connections import OpenDatabase
from lightspan.stores._sql.group_commit import Work
from lightspan.stores._sql.store import SQLStore
from lightspan.stores.protocol import StoreCapabilities
from lightspan.stores.sqlite import file
from lightspan.stores.sqlite.tables import SQLiteReadTables, SQLiteWriteTables

T = TypeVar("T")
R = TypeVar("R")


class _MemoryDatabase(OpenDatabase):
    """One connection that all threads share; a lock lets one at a time use it."""

    def __init__(
        self, db: sqlite3.Connection, clock: Callable[[], float], on_move: Callable[[], None]
    ) -> None:
        self._db = db
        self._on_move = on_move
        self._lock = threading.Lock()
        self._tables = SQLiteWriteTables(db, clock)
        super().__init__(self._tables, self._tables, SQLiteReadTables(db, clock))

    async def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> list[R]:
        with self._lock:
            self._db.execute("BEGIN")
            try:
                self._tables.begin()
                answers = work(items)
                self._db.execute("COMMIT")
            except BaseException as error:
                file.roll_back(self._db)
                if isinstance(error, sqlite3.Error):  # such as SQLITE_FULL and SQLITE_NOMEM
                    raise StoreError(f"the store in memory refused a write: {error}") from error
                raise
            moved = self._tables.moved
        if moved:
            self._on_move()
        return answers

    async def read(self, query: Callable[[], R]) -> R:
        return self._query(query)

    def _query(self, query: Callable[[], R]) -> R:
        with self._lock:
            return query()

    def stop(self) -> None:
        """Close nothing: a store that is opened again has the same content."""


class MemoryStore(SQLStore[_MemoryDatabase]):
    """A store for one process (any thread, any event loop), whose content ends with the object."""

    capabilities = StoreCapabilities(durable=False, multi_process=False)
    url = "memory:"

    def __init__(self, *, clock: Callable[[], float] = machine.now) -> None:
        self._clock = clock
        self._db = file.connect_memory()
        weakref.finalize(self, self._db.close)
        super().__init__(self.url, (60.0, 60.0))

    def _start(self) -> _MemoryDatabase:
        return _MemoryDatabase(self._db, self._clock, self._signal.notify)
