"""The tables of a PostgreSQL schema: their queries and transactions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import psycopg
from psycopg import sql

from lightspan.schema.records import Attempt
from lightspan.stores._sql.tables import Ends, ReadTables, SQLTables, WriteTables
from lightspan_cluster.postgres.server import Connection, Link

CHANNEL: Final = "lightspan"
"""PostgreSQL's channel for notifications. Their text is the schema in which a rollout's status has
changed."""
_COUNTED: Final = "insert_spans"
"""Name of the only insertion whose number of inserted rows is needed."""
_LISTS: Final = re.compile(r"IN \((\?|:\w+)\.\.\.\)")
_NAMED: Final = re.compile(r":(\w+)")

_BEGIN: Final = """
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SELECT extract(epoch FROM clock_timestamp())::float8
"""
# The outer SELECT is evaluated once the row is locked, so the time is not from before the wait.
_BEGIN_TO_MOVE: Final = """
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SELECT extract(epoch FROM clock_timestamp())::float8, change, position
FROM (SELECT * FROM ends FOR UPDATE) AS locked
"""


class _Session(SQLTables):
    """Queries of the store's tables over one connection."""

    package = "lightspan_cluster.postgres"

    def __init__(self, link: Link, clock: Callable[[], float] | None) -> None:
        self.link: Final = link
        self._clock = clock

    @property
    def _db(self) -> Connection:
        return self.link.db

    @staticmethod
    def _translate(query: str) -> str:
        """Translate a query for psycopg: lists become arrays, placeholders become `%s`."""
        query = _LISTS.sub(r"= ANY(\1)", query)
        return _NAMED.sub(r"%(\1)s", query.replace("?", "%s"))

    def _execute_for(self, name: str, ids: Sequence[str]) -> list[Any]:
        return self._execute(name, list(ids))  # one array, however many ids

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
    """The queries and changes that a writer thread makes in the store's tables.

    The table `ends` has one row, which serves as a lock: a transaction that adds or changes
    rollouts or attempts locks it, so only one runs at a time. A transaction that only adds other
    rows does not wait for the lock.
    """

    def __init__(self, link: Link, clock: Callable[[], float] | None) -> None:
        super().__init__(link, clock)
        self.begun: list[str] = []
        """Ids of the attempts that the transaction inserts. If they exist later, it was
        committed."""
        self._unsent: list[tuple[bytes, list[list[Any]] | None]] = []
        self._time = 0.0
        self._ends: Ends | None = None
        self._before: Ends | None = None
        schema = sql.Literal(link.server.address.schema).as_string()
        self._notify = f" RETURNING pg_notify('{CHANNEL}', {schema})"

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
            notify = self._notify if self.moved else ""
            last.insert(0, f"UPDATE ends SET {ends}{notify}".encode())
        self._send(last)

    def _current_ends(self) -> Ends:
        assert self._ends is not None, "the transaction only adds rows"
        return self._ends

    def _insert(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        """Queue rows to be sent together with the commit; return their number.

        Sending them at once would take one more round trip to the server, and other writers may
        wait for this transaction. Only the query named `_COUNTED` is sent at once, because the
        server has to count the rows that are new.
        """
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
        """Send the queued statements, followed by those in `last`, in one round trip."""
        unsent = [*self._unsent, *((query, None) for query in last)]
        self._unsent = []
        is_pipelined = len(unsent) > 1 and psycopg.Pipeline.is_supported()
        with self._db.pipeline() if is_pipelined else nullcontext():
            for query, columns in unsent:
                self._db.execute(query, columns)

    def _update(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        # of several changes of one row, whose last column is its id, the last one counts
        self._insert(name, list({row[-1]: row for row in rows}.values()))

    def insert_attempts(self, rows: Sequence[Attempt]) -> None:
        self.begun += [attempt.attempt_id for attempt in rows]
        super().insert_attempts(rows)

    def _writer_rows(self, attempt_ids: Sequence[str]) -> list[Any]:
        # No other transaction moves an attempt while this one holds the row of `ends`. Without it
        # the attempts are locked instead, unless one is being moved: waiting for that while holding
        # others could be a deadlock.
        return self._execute("writers_now" if self._ends is None else "writers", list(attempt_ids))


class PostgresReadTables(_Session, ReadTables):
    """The queries that the reader makes in the store's tables."""

    def now(self) -> float:
        return float(self._execute("now")[0][0]) if self._clock is None else self._clock()
