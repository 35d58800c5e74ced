"""Run the queries of a SQL store in SQLite's dialect."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec

from lightspan.schema.records import Attempt
from lightspan.stores._sql.tables import Ends, ReadTables, SQLTables, WriteTables

_ROWS_PER_STATEMENT: Final = 64
_LISTS: Final = re.compile(r"IN \((\?|:\w+)\.\.\.\)")
_json = msgspec.json.Encoder()


class _Connection(SQLTables):
    package = "lightspan.stores.sqlite"
    # The plus makes SQLite search by the cursor instead of by the run.
    filters: ClassVar[Mapping[str, str]] = {
        **SQLTables.filters,
        "watched_run": "+run_id = :watched_run",
    }

    def __init__(self, db: sqlite3.Connection, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock

    def now(self) -> float:
        return self._clock()

    @staticmethod
    def _translate(query: str) -> str:
        """Rewrite `IN` conditions on lists, because SQLite has no list parameters.

        The list is passed as a JSON array, and the rewritten condition reads it by `json_each`.
        """
        return _LISTS.sub(r"IN (SELECT value FROM json_each(\1))", query)

    def _run(self, query: str, values: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        return self._db.execute(query, values).fetchall()

    def _list(self, values: Sequence[str] | Sequence[int]) -> str:
        return _json.encode(values).decode()


class SQLiteWriteTables(_Connection, WriteTables):
    """The queries of `WriteTables`, which write to a store, in SQLite's dialect."""

    def __init__(self, db: sqlite3.Connection, clock: Callable[[], float]) -> None:
        super().__init__(db, clock)
        self._ends: Ends | None = None
        self._first_lease_end: float | None = None

    def begin(self) -> None:
        """Discard the values that were cached in the last transaction, before a new transaction."""
        self._ends = None
        self.moved = False

    def _current_ends(self) -> Ends:
        if self._ends is None:
            [(change, position, self._first_lease_end)] = self._execute("ends")
            self._ends = Ends(change, position)
        return self._ends

    def _insert(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        # Each statement releases the GIL, which in a busy process takes long to acquire again, so
        # one statement inserts many rows.
        new = 0
        for start in range(0, len(rows), _ROWS_PER_STATEMENT):
            block = rows[start : start + _ROWS_PER_STATEMENT]
            query = self._queries()[name]
            if len(block) > 1:
                before, values, after = query.partition("VALUES ")
                row, end, after = after.partition("\n")
                query = f"{before}{values}{', '.join([row] * len(block))}{end}{after}"
            new += self._db.execute(query, [value for row in block for value in row]).rowcount
        return new

    def _update(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        if len(rows) == 1:
            self._db.execute(self._queries()[name], rows[0])
        elif rows:
            self._db.executemany(self._queries()[name], rows)

    def insert_attempts(self, rows: Sequence[Attempt]) -> None:
        super().insert_attempts(rows)
        self._ends = None  # another lease may end first

    def update_attempts(self, rows: Sequence[Attempt]) -> None:
        super().update_attempts(rows)
        self._ends = None  # another lease may end first

    def expired(self, now: float, limit: int) -> list[Attempt]:
        self._current_ends()
        if self._first_lease_end is None or self._first_lease_end > now:
            return []
        return super().expired(now, limit)


class SQLiteReadTables(_Connection, ReadTables):
    """The queries of `ReadTables`, which read a store, in SQLite's dialect."""

    def use(self, db: sqlite3.Connection) -> None:
        """Run the next queries over another connection."""
        self._db = db
