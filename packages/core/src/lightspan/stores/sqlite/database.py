"""What an open SQLite store has: a writer and a reader, each with a connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from lightspan.stores._lease_time import Clock
from lightspan.stores._sql.database import OpenDatabase
from lightspan.stores._sql.jobs import Work
from lightspan.stores.sqlite import file
from lightspan.stores.sqlite.tables import SQLiteReadTables, SQLiteWriteTables
from lightspan.stores.sqlite.writer import Writer

T = TypeVar("T")
R = TypeVar("R")


class SQLiteDatabase(OpenDatabase):
    """Two connections and their threads, of one process: the work runs in the writer's, or in an
    event loop's."""

    def __init__(
        self,
        path: Path,
        power_loss: bool,
        clock: Clock,
        on_move: Callable[[], None],
    ) -> None:
        self._path = path
        self._on_move = on_move
        writing = file.connect(path, power_loss=power_loss)
        try:
            self._reading = file.connect(path, read_only=True)
        except BaseException:
            writing.close()
            raise
        self.tables = SQLiteWriteTables(writing, clock)
        super().__init__(self.tables, self.tables, SQLiteReadTables(self._reading, clock))
        self._writer = Writer(
            writing,
            path,
            self.tables.begin,
            self._committed,
            self.tables.rolled_back,
            small_here=not power_loss,
        )

    def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> Awaitable[list[R]]:
        return self._writer.write(work, items, cost)

    def _query(self, query: Callable[[], R]) -> R:
        try:
            return file.patiently(query)
        except Exception as error:
            if not file.is_low_level(error):
                raise
            raise file.explain(error, self._path) from error

    def stop(self) -> None:
        self._read_thread.shutdown()
        self._reading.close()
        self._writer.stop()

    def _committed(self) -> None:
        if self.tables.moved:
            self._on_move()
