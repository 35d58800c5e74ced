"""Run untrusted SQL queries on a SQLite file, with limits on every resource.

The connection is read-only. An authorizer permits only SELECT, reads of the file's own tables, and
the functions in `FUNCTIONS`. Time, virtual machine steps, string length, rows and the size of the
result have limits. Because of the limit of steps, an expensive query is refused no matter how busy
the machine is.
"""

from __future__ import annotations

import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

Value = int | float | str | bytes | None
"""Value of a cell that SQLite returns."""

FUNCTIONS = frozenset(
    """
    abs avg coalesce count date datetime glob group_concat ifnull iif instr julianday length like
    lower max min nullif replace round sign strftime substr substring sum time total
    typeof unicode upper
    row_number rank dense_rank ntile lag lead first_value last_value
    """.split()  # noqa: SIM905
)
"""SQL functions that a query may call.

A running function cannot be interrupted, so each of these takes at most one or two milliseconds on
texts of the maximum length. `trim(text, letters)` is missing, because its time grows with the
product of both lengths.
"""

MAX_STEPS = 5_000_000
"""Maximum number of virtual machine steps of a query."""

MAX_AUTHORIZATIONS = 20_000
"""Maximum number of authorizer calls while a query is compiled; stops exponential expansion."""

MAX_EXPANSION = 64
"""Maximum number of copies of a query's common table expressions."""

MAX_RESULT_BYTES = 1_000_000
"""Maximum total size of the texts and blobs of a result."""

_STEPS_PER_CHECK = 100

_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 10,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 25_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 10,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 1,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


class QueryError(Exception):
    """The query was refused, failed or exceeded a limit; the message gives the reason."""


@dataclass(frozen=True)
class Result:
    """The rows that a query returned."""

    rows: tuple[tuple[Value, ...], ...]
    truncated: bool = False
    """Whether the query had more rows than `max_rows`."""


def execute(
    db_path: str | Path, query: str, *, timeout: float = 2.0, max_rows: int = 1_000
) -> Result:
    """Run one SELECT statement and return its rows.

    Args:
        timeout: limit in seconds.
        max_rows: maximum number of rows; if there are more, the result is `truncated`.

    Raises:
        QueryError: the query was refused, failed or exceeded a limit.
        FileNotFoundError: the database file does not exist.
        ValueError: the file is not a SQLite database.
    """
    _check_text(query)
    guard = _Guard(deadline=time.monotonic() + timeout)
    with closing(_connect(db_path)) as connection:
        guard.attach(connection)
        try:
            return _fetch(connection.execute(query), max_rows)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise QueryError(guard.exceeded or str(error)) from None


def schema_text(db_path: str | Path) -> str:
    """Return a description of a database for a model: one line `table NAME: COLUMN …` per table."""
    with closing(_connect(db_path)) as connection:
        lines = []
        for table in sorted(_tables(connection)):
            quoted = table.replace('"', '""')
            columns = connection.execute(f'PRAGMA table_info("{quoted}")').fetchall()
            lines.append(f"table {table}: {' '.join(column[1] for column in columns)}")
    return "\n".join(lines)


_TOKEN = re.compile(
    r"""--[^\n]*|/\*.*?(?:\*/|\Z)"""
    r"""|'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^]]*\]"""
    r"""|(?:[\w$]|[^\x00-\x7f])+|\S""",
    re.DOTALL,
)


def _check_text(query: str) -> None:
    """Raise `QueryError` for a query that could take too long to compile.

    SQLite compiles a query before its limits apply.
    """
    if "\0" in query:
        raise QueryError("the query contains a null character")
    try:
        query.encode()
    except UnicodeEncodeError:
        raise QueryError("the query is not valid Unicode") from None
    if len(query) > _LIMITS[sqlite3.SQLITE_LIMIT_SQL_LENGTH]:
        raise QueryError("query string is too large")
    if _expansion(query) > MAX_EXPANSION:
        raise QueryError("query is too complex")


def _expansion(query: str) -> int:
    """Return an upper bound of the copies of common table expressions that compiling `query` makes.

    SQLite copies an expression, and all that it mentions, at each mention. Thirty expressions that
    each mention the previous one twice would become a billion copies.
    """
    texts = (match.group() for match in _TOKEN.finditer(query))
    tokens = [token.lower() for token in texts if not token.startswith(("--", "/*"))]
    bare = Counter(token.strip("'\"`[]") for token in tokens)
    return math.prod(max(1, bare[name] - 1) for name in _common_table_names(tokens))


def _common_table_names(tokens: list[str]) -> set[str]:
    """Return the names in `NAME [(COLUMNS)] AS [[NOT] MATERIALIZED] (`.

    Args:
        tokens: tokens of the query in lower case.

    Raises:
        QueryError: a name contains quotes.
    """
    names = set()
    for position, token in enumerate(tokens):
        following = [word for word in tokens[position + 1 : position + 4] if word not in _HINTS]
        if token != "as" or following[:1] != ["("]:
            continue
        before = position - 1
        if tokens[before] == ")":
            while before > 0 and tokens[before] != "(":
                before -= 1
            before -= 1
        name = tokens[before].strip("'\"`[]")
        if set(name) & set("'\"`"):
            raise QueryError(f"{name} is no plain name")
        names.add(name)
    return names


_HINTS = ("not", "materialized")


class _Guard:
    """Limits on a connection: it permits bounded reads only, and records the exceeded limit."""

    def __init__(self, deadline: float) -> None:
        self.exceeded: str | None = None
        self._deadline = deadline
        self._steps = 0
        self._authorizations = 0
        self._tables: frozenset[str] = frozenset()

    def attach(self, connection: sqlite3.Connection) -> None:
        """Apply the limits to `connection` until it is closed."""
        self._tables = frozenset(name.lower() for name in _tables(connection))
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_progress_handler(self._progress, _STEPS_PER_CHECK)
        connection.set_authorizer(self._authorize)

    def _progress(self) -> bool:
        self._steps += _STEPS_PER_CHECK
        if self._steps > MAX_STEPS:
            self.exceeded = f"query took more than {MAX_STEPS} steps"
        elif time.monotonic() > self._deadline:
            self.exceeded = "query took too long"
        return self.exceeded is not None

    def _authorize(
        self, action: int, first: str | None, second: str | None, schema: str | None, _: str | None
    ) -> int:
        self._authorizations += 1
        if self._authorizations > MAX_AUTHORIZATIONS:
            self.exceeded = "query is too complex"
            return sqlite3.SQLITE_DENY
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ and self._may_read(first, second, schema):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def _may_read(self, table: str | None, column: str | None, schema: str | None) -> bool:
        if not column:  # a table whose columns are not used; a CTE too
            return True
        return schema == "main" and (table or "").lower() in self._tables


def _connect(db_path: str | Path) -> sqlite3.Connection:
    path = Path(db_path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no database file at {path}")
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ValueError(f"{path} can't be read as a SQLite database: {error}") from None
    return connection


def _tables(connection: sqlite3.Connection) -> Iterator[str]:
    rows = connection.execute(
        "SELECT name FROM sqlite_schema "
        "WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    )
    return (name for (name,) in rows)


def _fetch(cursor: sqlite3.Cursor, max_rows: int) -> Result:
    if cursor.description is None:
        raise QueryError("not a query")
    rows: list[tuple[Value, ...]] = []
    size = 0
    for row in cursor:
        if len(rows) == max_rows:
            return Result(tuple(rows), truncated=True)
        size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
        if size > MAX_RESULT_BYTES:
            raise QueryError(f"result is larger than {MAX_RESULT_BYTES} bytes")
        rows.append(row)
    return Result(tuple(rows))
