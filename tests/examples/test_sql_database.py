"""Test that queries run read-only, within limits, and only with listed functions."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from sql_example.database import QueryError, Result, execute, schema_text


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "music.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE singers (id INTEGER PRIMARY KEY, name TEXT, age INTEGER)")
        connection.execute("CREATE TABLE songs (id INTEGER PRIMARY KEY, singers_id INTEGER)")
        connection.executemany(
            "INSERT INTO singers VALUES (?, ?, ?)", [(1, "Ada", 30), (2, "Bob", None), (3, "Cy", 9)]
        )
        connection.executemany("INSERT INTO songs VALUES (?, 1)", [(i,) for i in range(2000)])
    return path


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("SELECT name, age FROM singers ORDER BY id", (("Ada", 30), ("Bob", None), ("Cy", 9))),
        ("SELECT sum(age), min(age), max(age), avg(age) FROM singers", ((39, 9, 30, 19.5),)),
        ("SELECT DISTINCT upper(name) FROM singers WHERE name LIKE 'a%'", (("ADA",),)),
        ("WITH old AS (SELECT * FROM singers WHERE age > 9) SELECT name FROM old", (("Ada",),)),
        ("SELECT rank() OVER (ORDER BY id) FROM singers LIMIT 1", ((1,),)),
        (
            "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 3) "
            "SELECT i FROM n",
            ((1,), (2,), (3,)),
        ),
        (
            "SELECT count(*) FROM songs JOIN singers ON singers_id = singers.id WHERE name = 'Ada'",
            ((2000,),),
        ),
    ],
)
def test_what_questions_need_is_permitted(
    db: Path, query: str, rows: tuple[tuple[object, ...], ...]
) -> None:
    assert execute(db, query).rows == rows


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("ATTACH ':memory:' AS other", "not authorized"),
        ("PRAGMA query_only = OFF", "not authorized"),
        ("SELECT * FROM pragma_table_info('singers')", "not authorized"),
        ("SELECT name FROM sqlite_schema", "access to sqlite_master.name is prohibited"),
        ("INSERT INTO singers VALUES (4, 'Di', 1)", "not authorized"),
        ("DROP TABLE singers", "not authorized"),
        ("CREATE TABLE other (id INTEGER)", "not authorized"),
        ("VACUUM INTO '/tmp/copy.sqlite'", "authorization denied"),
        ("BEGIN", "not authorized"),
        ("SELECT load_extension('/tmp/evil.so')", "not authorized to use function: load_extension"),
        ("SELECT randomblob(1000000000)", "not authorized to use function: randomblob"),
        ("SELECT printf('%1000000000d', 1)", "not authorized to use function: printf"),
        ("SELECT random()", "not authorized to use function: random"),
        ("SELECT 1; DROP TABLE singers", "You can only execute one statement at a time."),
        ("", "not a query"),
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT France FROM singers", "no such column: France"),
        ("SELECT '\ud800'", "the query is not valid Unicode"),
    ],
)
def test_refused(db: Path, query: str, message: str) -> None:
    before = db.read_bytes()
    with pytest.raises(QueryError) as caught:
        execute(db, query)
    assert str(caught.value) == message
    assert db.read_bytes() == before


LONG_TEXT = "replace(replace(replace('" + "x" * 99 + "', 'x', '{0}'), 'x', '{0}'), 'x', '{0}')"
SLOW_TEXT = f"replace('{'x' * 99}', 'x', '{'x' * 99}')"


def doubling(common_table: str) -> str:
    """Return thirty common table expressions, each of which mentions the previous one twice."""
    head = "WITH c0 AS (SELECT 1 AS i)"
    body = "".join(common_table.format(i=i, j=i - 1) for i in range(1, 30))
    return f"{head}{body} SELECT count(*) FROM c29"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n) "
            "SELECT count(*) FROM n",
            "query took more than 5000000 steps",
        ),
        (
            f"SELECT count(instr({SLOW_TEXT}, substr({SLOW_TEXT}, 1, 4900) || a.id)) "
            "FROM songs a, songs b",
            "query took too long",
        ),
        (f"SELECT {LONG_TEXT.format('x' * 99)}", "string or blob too big"),
        ("SELECT 1" + " + 1" * 60, "Expression tree is too large (maximum depth 50)"),
        ("SELECT " + " + 1" * 3000, "query string is too large"),
        (f"SELECT '{'%a' * 60}' LIKE '{'%a' * 60}'", "LIKE or GLOB pattern too complex"),
        (
            doubling(", c{i} (i) AS NOT/**/MATERIALIZED (SELECT a.i FROM c{j} a, [c{j}] b)"),
            "query is too complex",
        ),
        (doubling(', "c""{i}" AS (SELECT 1)'), 'c""1 is no plain name'),
    ],
)
def test_bombs_are_defused_quickly(db: Path, query: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(QueryError) as caught:
        execute(db, query)
    assert str(caught.value) == message
    assert time.monotonic() - started < 10


def test_the_time_limit(db: Path) -> None:
    with pytest.raises(QueryError, match=r"^query took too long$"):
        execute(db, "SELECT count(*) FROM songs a, songs b, songs c", timeout=0.0)


def test_the_row_limit_truncates(db: Path) -> None:
    assert execute(db, "SELECT id FROM singers", max_rows=2) == Result(((1,), (2,)), truncated=True)
    assert execute(db, "SELECT id FROM singers", max_rows=3) == Result(((1,), (2,), (3,)))


def test_the_result_size_limit(db: Path) -> None:
    wide = f"replace('{'x' * 99}', 'x', '{'y' * 99}')"
    with pytest.raises(QueryError, match=r"^result is larger than 1000000 bytes$"):
        execute(db, f"SELECT {wide} FROM songs")


def test_a_missing_or_foreign_file_is_not_the_query_s_fault(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no database file at"):
        execute(tmp_path / "absent.sqlite", "SELECT 1")
    assert not (tmp_path / "absent.sqlite").exists()
    (tmp_path / "notes.txt").write_text("not a database" * 100)
    with pytest.raises(ValueError, match="can't be read as a SQLite database"):
        execute(tmp_path / "notes.txt", "SELECT 1")


def test_schema_text(db: Path) -> None:
    assert schema_text(db) == "table singers: id name age\ntable songs: id singers_id"
