"""Test the execution accuracy: equal results on three populations of the database.

The order of rows counts only if the right query orders them.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sql_example.database import QueryError, Result, Value
from sql_example.reward import execution_accuracy, same_result
from sql_example.worlds import Task

POPULATIONS = (
    [("Ada", 30, "Rome"), ("Bob", 20, "Oslo"), ("Cy", 40, "Rome")],
    [("Di", 30, "Oslo"), ("Ed", 31, "Rome")],
    [("Flo", 50, "Oslo"), ("Gus", 30, "Oslo"), ("Hal", 10, "Lima"), ("Ida", 33, "Rome")],
)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for index, rows in enumerate(POPULATIONS):
        path = tmp_path / f"{index}.sqlite"
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE singers (name TEXT, age INTEGER, city TEXT)")
            connection.executemany("INSERT INTO singers VALUES (?, ?, ?)", rows)
    return tmp_path


def task(gold: str, *, ordered: bool = False) -> Task:
    return Task(
        id="t",
        question="?",
        schema="table singers: name age city",
        databases=["0.sqlite", "1.sqlite", "2.sqlite"],
        gold=gold,
        ordered=ordered,
    )


@pytest.mark.parametrize(
    ("gold", "query", "reward"),
    [
        ("SELECT count(*) FROM singers", "SELECT count(name) AS n FROM singers;", 1.0),
        ("SELECT count(*) FROM singers", "SELECT 3", 0.0),
        ("SELECT count(*) FROM singers", "SELECT count(*) * 1.0 FROM singers", 1.0),
        ("SELECT count(*) FROM singers", "SELECT '' || count(*) FROM singers", 0.0),
        ("SELECT count(*) FROM singers WHERE age >= 30",
         "SELECT count(*) FROM singers WHERE age > 30", 0.0),
        ("SELECT count(*) FROM singers WHERE age >= 30",
         "SELECT count(*) FROM singers WHERE age > 29", 1.0),
        ("SELECT name FROM singers", "SELECT name FROM singers ORDER BY name DESC", 1.0),
        ("SELECT DISTINCT city FROM singers", "SELECT city FROM singers GROUP BY city", 1.0),
        ("SELECT DISTINCT city FROM singers", "SELECT city FROM singers", 0.0),
        ("SELECT name FROM singers", "SELECT name, age FROM singers", 0.0),
        ("SELECT avg(age) FROM singers", "SELECT sum(age) * 1.0 / count(*) FROM singers", 1.0),
        ("SELECT avg(age) FROM singers", "SELECT sum(age) / count(*) FROM singers", 0.0),
        ("SELECT name FROM singers", "SELECT name FROM singer", 0.0),
        ("SELECT name FROM singers", "DROP TABLE singers", 0.0),
        ("SELECT name FROM singers", "I do not know.", 0.0),
    ],
)  # fmt: skip
def test_execution_accuracy(data_dir: Path, gold: str, query: str, reward: float) -> None:
    assert execution_accuracy(query, task(gold), data_dir) == reward


def test_order_matters_only_where_the_gold_query_orders(data_dir: Path) -> None:
    gold = "SELECT name FROM singers ORDER BY age"
    backwards = "SELECT name FROM singers ORDER BY age DESC"
    assert execution_accuracy(backwards, task(gold, ordered=True), data_dir) == 0.0
    assert execution_accuracy(backwards, task(gold, ordered=False), data_dir) == 1.0
    assert execution_accuracy(gold, task(gold, ordered=True), data_dir) == 1.0


def test_a_bad_task_raises(data_dir: Path) -> None:
    with pytest.raises(QueryError, match="no such table: singer"):
        execution_accuracy("SELECT 1", task("SELECT 1 FROM singer"), data_dir)
    with pytest.raises(FileNotFoundError, match="no database file at"):
        execution_accuracy("SELECT 1", task("SELECT 1 FROM singers"), data_dir / "absent")


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([(1,)], [(1.0,)], True),
        ([(0.1 + 0.2,)], [(0.3,)], True),
        ([(0.3001,)], [(0.3,)], False),
        ([(1,)], [("1",)], False),
        ([(None,)], [(None,)], True),
        ([(None,)], [("",)], False),
        ([(10**18,)], [(10**18 + 1,)], False),
        ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)], True),
        ([("a",), ("a",), ("b",)], [("a",), ("b",), ("b",)], False),
        ([], [], True),
        ([(1, "a")], [("a", 1)], False),
    ],
)
def test_same_result(
    found: list[tuple[Value, ...]], expected: list[tuple[Value, ...]], same: bool
) -> None:
    assert same_result(Result(tuple(found)), Result(tuple(expected)), ordered=False) is same
