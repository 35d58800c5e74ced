"""The reward: 1 if the query gives the right result on every database of the schema, else 0."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from sql_example.database import QueryError, Result, Value, execute
from sql_example.worlds import Task


def execution_accuracy(query: str, task: Task, data_dir: str | Path) -> float:
    """Return 1.0 if `query` and the gold query have equal results on all databases of a task, else
    0.0.

    The order of rows matters only if the gold query orders them. The reward is 0.0 if `query`
    fails, is refused or exceeds a limit.

    Raises:
        QueryError: the gold query fails.
        FileNotFoundError: a database file does not exist.
    """
    for name in task["databases"]:
        path = Path(data_dir) / name
        expected = execute(path, task["gold"])
        try:
            answered = execute(path, query)
        except QueryError:
            return 0.0
        if not same_result(answered, expected, ordered=task["ordered"]):
            return 0.0
    return 1.0


def same_result(answered: Result, expected: Result, *, ordered: bool) -> bool:
    """Return whether two results are equal, in the same order of rows if `ordered`, else in any
    order.

    Numbers are equal up to nine significant digits, whatever their type; a number never equals a
    text. A truncated result equals no result.
    """
    if answered.truncated or expected.truncated or len(answered.rows) != len(expected.rows):
        return False
    left, right = _comparable(answered), _comparable(expected)
    return left == right if ordered else Counter(left) == Counter(right)


def constant_query_scores(
    queries: Iterable[str], tasks: Sequence[Task], data_dir: str | Path
) -> dict[str, float]:
    """Return query → execution accuracy over `tasks` of giving this query to every question."""
    candidates = list(dict.fromkeys(queries))
    hits = dict.fromkeys(candidates, 0)
    by_schema: dict[tuple[str, ...], list[Task]] = {}
    for task in tasks:
        by_schema.setdefault(tuple(task["databases"]), []).append(task)
    for databases, group in by_schema.items():
        first = Path(data_dir) / databases[0]
        for query in _runnable(candidates, first):
            hits[query] += sum(execution_accuracy(query, task, data_dir) == 1.0 for task in group)
    return {query: count / len(tasks) for query, count in hits.items()}


def _runnable(queries: Iterable[str], path: Path) -> list[str]:
    """Return the queries that compile with the schema of a database; all others would score 0.0."""
    compiled = []
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        for query in queries:
            try:
                connection.execute(f"EXPLAIN {query}")
            except (sqlite3.Error, sqlite3.Warning):
                continue
            compiled.append(query)
    return compiled


def _comparable(result: Result) -> list[tuple[Value, ...]]:
    return [tuple(_rounded(cell) for cell in row) for row in result.rows]


def _rounded(cell: Value) -> Value:
    return float(f"{cell:.9g}") if isinstance(cell, float) else cell
