"""MemoryStore: a store in this process's memory, for tests, dry runs and notebooks.

It is a SQLite database without a file.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightspan.schema import clock as machine
from lightspan.stores._sql.connections import OpenDatabase
from lightspan.stores._sql.group_commit import Work
from lightspan.stores._sql.store import SQLStore
from lightspan.stores.protocol import StoreCapabilities
from lightspan.stores.sqlite import file
from lightspan.stores.sqlite.tables import SQLiteReadTables, SQLiteWriteTables

T = TypeVar("T")
R = TypeVar("R")


class MemoryStore(SQLStore["_MemoryDatabase"]):
    """A store for one process, usable from any thread and any event loop.

    Its content is lost with the object.
    """

    capabilities = StoreCapabilities(durable=False, multi_process=False)
    url = "memory:"

    def __init__(self, *, clock: Callable[[], float] = machine.now) -> None:
        super().__init__(self.url, (60.0, 60.0))
        self.clock = clock
        self.db = file.connect_to_memory()
        self.lock = threading.Lock()
        weakref.finalize(self, self.db.close)

    def _start(self) -> _MemoryDatabase:
        return _MemoryDatabase(self, self._signal.notify)


class _MemoryDatabase(OpenDatabase):
    """The connection of a memory store, which one thread at a time uses."""

    def __init__(self, store: MemoryStore, on_move: Callable[[], None]) -> None:
        self._db, self._lock, self._on_move = store.db, store.lock, on_move
        self._tables = SQLiteWriteTables(store.db, store.clock)
        super().__init__(self._tables, self._tables, SQLiteReadTables(store.db, store.clock))

    async def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> list[R]:
        with self._lock:
            self._db.execute("BEGIN")
            try:
                self._tables.begin()
                answers = work(items)
                self._db.execute("COMMIT")
            except BaseException:
                file.roll_back(self._db)
                raise
        if self._tables.moved:
            self._on_move()
        return answers

    async def read(self, query: Callable[[], R]) -> R:
        return self._query(query)

    def _query(self, query: Callable[[], R]) -> R:
        with self._lock:
            return query()

    def stop(self) -> None:
        """Close nothing: a store that is opened again has the same content."""
