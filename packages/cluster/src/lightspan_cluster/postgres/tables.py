"""The tables of a PostgreSQL schema: how PostgreSQL is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, Final

import psycopg
from psycopg import sql

from lightspan.schema.records import Attempt
from lightspan.stores._sql.queries import named_queries
from lightspan.stores._sql.tables import Ends, ReadTables, SQLTables, WriteTables
from lightspan_cluster.postgres.server import Connection, Link

CHANNEL: Final = "lightspan"
"""Where a session says that something has moved in its schema."""
_COUNTED: Final = "insert_spans"
"""The one insertion of which it matters how many rows were new."""
_PACKAGE: Final = "lightspan_cluster.postgres"
_LISTS: Final = re.compile(r"IN \((\?|:\w+)\.\.\.\)")
_NAMED: Final = re.compile(r":(\w+)")

_BEGIN: Final = """
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SELECT extract(epoch FROM clock_timestamp())::float8
"""
# The outer SELECT is computed when the row is locked: the time is not that of before the wait.
_BEGIN_TO_MOVE: Final = """
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SELECT extract(epoch FROM clock_timestamp())::float8, change, position
FROM (SELECT * FROM ends FOR UPDATE) AS locked
"""


class _Session(SQLTables):
    def __init__(self, link: Link, clock: Callable[[], float] | None) -> None:
        self.link: Final = link
        self._clock = clock

    @property
    def _db(self) -> Connection:
        return self.link.db

    def _queries(self) -> Mapping[str, str]:
        return queries()

    def _queries_of_one(self) -> Mapping[str, str]:
        return queries()

    def _translate(self, query: str) -> str:
        return _translate(query)

    def _execute_for(self, name: str, ids: Sequence[str]) -> list[Any]:
        return self._execute(name, list(ids))  # an array costs nothing

    def _run(self, query: str, values: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        with self._db.cursor(binary=True) as cursor:
            cursor.execute(query.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def _list(self, values: Sequence[str] | Sequence[int]) -> list[str | int]:
        return list(values)

    def _pack_text(self, text: str) -> bytes:
        return text.encode(errors="surrogatepass")

    def _read_text(self, kept: bytes) -> str:
        return kept.decode(errors="surrogatepass")


class PostgresWriteTables(_Session, WriteTables):
    """A writer's view. `begin` and `commit` are of a transaction: in one that moves things the row
    of `ends` is locked, so that there is one at a time; one that only adds waits for no attempt.
    """

    def __init__(self, link: Link, clock: Callable[[], float] | None) -> None:
        super().__init__(link, clock)
        self.begun: list[str] = []
        """The attempts that this transaction began, by which its commit can be told."""
        self._unsent: list[tuple[bytes, list[list[Any]] | None]] = []
        self._time = 0.0
        self._ends: Ends | None = None
        self._before: Ends | None = None
        schema = sql.Literal(link.server.address.schema).as_string()
        self._tell = f" RETURNING pg_notify('{CHANNEL}', {schema})"

    def now(self) -> float:
        return self._time if self._clock is None else self._clock()

    def begin(self, *, to_move: bool) -> None:
        self.moved = False
        self.begun = []
        self._unsent = []
        self._ends = None
        cursor = self._db.execute(_BEGIN_TO_MOVE if to_move else _BEGIN, prepare=False)
        cursor.nextset()
        [self._time, *locked] = cursor.fetchall()[0]
        if to_move:
            self._ends, self._before = Ends(*locked), Ends(*locked)

    def commit(self) -> None:
        last = [b"COMMIT"]
        if self._ends is not None and self._ends != self._before:
            ends = f"change = {self._ends.change:d}, position = {self._ends.position:d}"
            tell = self._tell if self.moved else ""
            last.insert(0, f"UPDATE ends SET {ends}{tell}".encode())
        self._send(last)

    def _current_ends(self) -> Ends:
        assert self._ends is not None, "a transaction that adds moves nothing"
        return self._ends

    def _insert(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        """What nobody waits for is sent with the commit: each trip to the server is a time in which
        others wait for the lock."""
        if not rows:
            return 0
        columns = [list(column) for column in zip(*rows, strict=True)]
        query = self._queries()[name].encode()
        if name == _COUNTED:
            self._send()
            return self._db.execute(query, columns).rowcount
        self._unsent.append((query, columns))
        return len(rows)

    def _run(self, query: str, values: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        self._send()
        return super()._run(query, values)

    def _send(self, last: Sequence[bytes] = ()) -> None:
        """Send what is not sent yet, and these statements, in one trip."""
        unsent = [*self._unsent, *((query, None) for query in last)]
        self._unsent = []
        together = len(unsent) > 1 and psycopg.Pipeline.is_supported()
        with self._db.pipeline() if together else nullcontext():
            for query, columns in unsent:
                self._db.execute(query, columns)

    def _update(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        # of several changes of one thing the last one counts; each row ends with its id
        self._insert(name, list({row[-1]: row for row in rows}.values()))

    def insert_attempts(self, rows: Sequence[Attempt]) -> None:
        self.begun += [attempt.attempt_id for attempt in rows]
        super().insert_attempts(rows)

    def _writer_rows(self, attempt_ids: Sequence[str]) -> list[Any]:
        # Nobody moves an attempt while this transaction has the row of `ends`. Without it the
        # attempts are locked instead, as far as nobody is moving one: to wait for that, holding
        # others, could be to wait in a circle.
        return self._execute("writers_now" if self._ends is None else "writers", list(attempt_ids))


class PostgresReadTables(_Session, ReadTables):
    """The reader's view."""

    def now(self) -> float:
        return float(self._execute("now")[0][0]) if self._clock is None else self._clock()


@cache
def queries() -> Mapping[str, str]:
    """The queries by name. Read once: an upgrade may replace the files while we run."""
    return named_queries(_PACKAGE, _translate)


def _translate(query: str) -> str:
    """PostgreSQL takes a list as an array, and psycopg has signs of its own for values."""
    query = _LISTS.sub(r"= ANY(\1)", query)
    return _NAMED.sub(r"%(\1)s", query.replace("?", "%s"))
