"""Load tasks from JSON values or a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.algorithms.jsonl import read_jsonl
from lightspan.errors import DataError
from lightspan.schema.records import BINARY, Json, check_keys, fingerprint, task_id, task_json


def load_tasks(tasks: Iterable[Json] | str | Path, what: str = "tasks") -> list[Json]:
    """Return validated tasks as a list.

    Args:
        tasks: iterable of JSON values, or path of a `.jsonl` file.
        what: name of the data in error messages, such as `train`.

    Raises:
        DataError: there is no task, a task is not JSON, the file is malformed, or `tasks` is a
            table (such as of pandas) or no iterable.
    """
    table = type(tasks)
    rows = _ROWS.get(table.__module__.partition(".")[0])
    if rows is not None and hasattr(table, "columns"):  # iteration would yield columns
        if hasattr(table, "collect"):  # polars' LazyFrame has no rows yet
            rows = f"collect().{rows}"
        raise DataError(f"{what} is a {table.__name__}: give its rows, as {what}={what}.{rows}")
    if isinstance(tasks, str | Path):
        items = read_jsonl(Path(tasks), what, "task")
    elif isinstance(tasks, Mapping) or not isinstance(tasks, Iterable):
        raise DataError(
            f"{what} must be a sequence of tasks or the path of a .jsonl file, not "
            f"{type(tasks).__name__}: {tasks!r:.200}"
        )
    else:
        items = list(tasks)
    if not items:
        raise DataError(f"{what}: there is no task; give at least one")
    return [json_task(task, f"{what}[{index}]") for index, task in enumerate(items)]


def load_distinct(tasks: Iterable[Json] | str | Path, what: str = "tasks") -> list[Json]:
    """Return validated tasks with distinct ids; the arguments are those of `load_tasks`.

    Raises:
        DataError: two tasks are equal or share an id, or `load_tasks` raises it.
    """
    items = load_tasks(tasks, what)
    check_ids(items, what)
    return items


def check_ids(tasks: Sequence[Json], what: str, *, may_repeat: bool = False) -> None:
    """Check that tasks have ids that differ.

    Args:
        tasks: the tasks.
        what: name of the tasks in error messages.
        may_repeat: whether tasks may be equal.

    Raises:
        DataError: two tasks share an id.
    """
    places: dict[str, int] = {}
    for index, task in enumerate(tasks):
        first = places.setdefault(task_id(task), index)
        if first != index and not (may_repeat and task == tasks[first]):
            raise DataError(
                f"{what}[{first}] and {what}[{index}] are equal, or have one id ({task_id(task)}): "
                "rewards are compared task by task, so make them differ"
            )


def clusters_of(tasks: Sequence[Json], key: str | None, what: str = "tasks") -> dict[str, str]:
    """Return the cluster of each task, by task id.

    Tasks of one cluster are correlated, which confidence intervals take into account.

    Args:
        tasks: the tasks. With a `key` they are JSON objects.
        key: field of a task that names its cluster; None for no clusters, so the result is empty.
        what: name of the data in error messages, such as `val`.

    Raises:
        DataError: a task lacks the field, or its value is neither text nor an integer.
    """
    if key is None:
        return {}
    clusters: dict[str, str] = {}
    for index, task in enumerate(tasks):
        value = task.get(key) if isinstance(task, dict) else None
        if not isinstance(value, str | int):
            raise DataError(
                f"{what}[{index}] has no cluster: cluster={key!r} names a key of every task, whose "
                f"value is a text or a whole number: {task!r:.200}"
            )
        name = str(value)
        clusters[task_id(task)] = name if len(name) <= MAX_NAME_LENGTH else fingerprint(name)
    return clusters


MAX_NAME_LENGTH: Final = 80
"""Maximum characters of a cluster's name; a longer name, such as a whole schema, is hashed."""

_ROWS: Final = {"pandas": 'to_dict("records")', "polars": "to_dicts()", "pyarrow": "to_pylist()"}
"""Library → method call that returns the rows of its tables, for an error message."""


def json_task(task: Any, where: str) -> Json:
    """Return `task` after a JSON round trip, so that it equals the task that runners get.

    The keys of dicts stay in order.

    Raises:
        DataError: `task` is not JSON, or a key is no text; the message names `where`.
    """
    try:
        plain = msgspec.to_builtins(task, builtin_types=BINARY)
        check_keys(plain, where)
        return json.loads(task_json(plain))
    except DataError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{where} is not JSON: {error}. A task is made of dicts, lists, text, finite numbers, "
            f"booleans and None: {task!r:.200}"
        ) from error
