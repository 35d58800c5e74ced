"""The reward: does the query answer the question on every population of the schema?"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from sql_example.database import QueryError, Result, Value, execute
from sql_example.worlds import Task


def execution_accuracy(query: str, task: Task, data_dir: str | Path) -> float:
    """1.0 if `query` gives the gold query's result on all populations of the task, else 0.0.

    The order of rows matters only where the gold query orders. A query that fails, is refused or
    exceeds a limit scores 0.0; a failing gold query or a missing file raises, as the task is at
    fault.
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
    """Whether two results are equal as lists of rows, or as bags of rows unless `ordered`.

    Numbers are equal up to nine significant digits, whatever their type; a number never equals a
    text. A truncated result equals nothing.
    """
    if answered.truncated or expected.truncated or len(answered.rows) != len(expected.rows):
        return False
    left, right = _comparable(answered), _comparable(expected)
    return left == right if ordered else Counter(left) == Counter(right)


def constant_query_scores(
    queries: Iterable[str], tasks: Sequence[Task], data_dir: str | Path
) -> dict[str, float]:
    """The execution accuracy over `tasks` of answering every question with the same query."""
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
    """The queries that compile against a schema; the others would score 0.0 one by one."""
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
