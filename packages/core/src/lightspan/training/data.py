"""Tasks, from a sequence of JSON values, a JSONL file, or what production was asked."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.algorithms.jsonl import read_jsonl
from lightspan.algorithms.recorded_attempts import Query, Time, read_attempts, reward_bound
from lightspan.algorithms.task_sampler import Epochs
from lightspan.errors import DataError
from lightspan.schema.records import Json, fingerprint, task_id
from lightspan.stores import open_existing, public_url
from lightspan.stores.aio import run_sync


def load_tasks(tasks: Iterable[Json] | str | Path, what: str = "tasks") -> list[Json]:
    """Tasks as a list, checked.

    Args:
        tasks: any iterable of JSON values, or the path of a `.jsonl` file.
        what: the data's name in errors, such as `train`.

    Raises:
        DataError: no task at all, one that is not JSON, or a malformed line of the file.
    """
    table = type(tasks)
    rows = _ROWS.get(table.__module__.partition(".")[0])
    if rows is not None and hasattr(table, "columns"):  # iterating gives the columns
        if hasattr(table, "collect"):  # polars' LazyFrame has none yet
            rows = f"collect().{rows}"
        raise DataError(
            f"{what} is a {table.__name__}: give its rows, such as {what}={what}.{rows}"
        )
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
    return [_checked(task, f"{what}[{index}]") for index, task in enumerate(items)]


def load_distinct(tasks: Iterable[Json] | str | Path, what: str = "tasks") -> list[Json]:
    """`load_tasks` for tasks that are compared one by one.

    Raises:
        DataError: two of them are equal, or have one id.
    """
    items = load_tasks(tasks, what)
    [(name, count)] = Counter(map(task_id, items)).most_common(1)
    if count > 1:
        first, second = [i for i, task in enumerate(items) if task_id(task) == name][:2]
        raise DataError(
            f"{what}[{first}] and {what}[{second}] are equal, or have one id ({name}): held-out "
            "rewards are compared task by task, so make them differ"
        )
    return items


def clusters_of(tasks: Sequence[Json], key: str | None, what: str = "tasks") -> dict[str, str]:
    """Task id → its cluster, by a key of the tasks; empty without a key.

    Raises:
        DataError: a task that has it not, or whose value is neither text nor a whole number.
    """
    if key is None:
        return {}
    found: dict[str, str] = {}
    for index, task in enumerate(tasks):
        value = task.get(key) if isinstance(task, dict) else None
        if not isinstance(value, str | int):
            raise DataError(
                f"{what}[{index}] does not say which cluster it is in: cluster={key!r} is the key "
                f"of a text or a whole number that tasks have: {task!r:.200}"
            )
        name = str(value)
        found[task_id(task)] = name if len(name) <= MAX_NAME_LENGTH else fingerprint(name)
    return found


MAX_NAME_LENGTH: Final = 80
"""Characters of a cluster's name; a longer one, such as a whole schema, is kept by its hash."""


_ROWS: Final = {"pandas": 'to_dict("records")', "polars": "to_dicts()", "pyarrow": "to_pylist()"}
"""Library → how its tables give their rows."""


def _checked(task: Any, where: str) -> Json:
    """The task as JSON gives it back, which is what runners and a resumed run see of it."""
    try:
        plain = msgspec.to_builtins(task, str_keys=True)
        return json.loads(json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise DataError(
            f"{where} is not JSON: {error}. A task is made of dicts, lists, text, finite numbers, "
            f"booleans and None: {task!r:.200}"
        ) from error


def tasks_from_store(
    store: str | os.PathLike[str],
    *,
    service: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    since: Time | None = None,
    until: Time | None = None,
    distinct: bool = True,
) -> list[Json]:
    """What production was asked, as tasks: the input of each attempt, oldest first.

    The input is what its root was given, else the messages of its first call (`{"messages": […]}`).

    Args:
        store: its URL.
        service: only attempts of this one.
        min_reward: only attempts that scored at least so much.
        max_reward: only attempts that scored at most so much: what went wrong, say.
        since: only attempts that began then or later.
        until: only attempts that began before.
        distinct: equal tasks once.

    Raises:
        ConfigError: a value that its argument does not take.
        DataError: there is no such task.
    """
    query = Query.of(service, since, until)
    least = reward_bound("min_reward", min_reward)
    most = reward_bound("max_reward", max_reward)

    async def read() -> list[Json]:
        async with open_existing(store) as opened:
            return [
                state.rollout.task
                async for state, _, episode in read_attempts(opened, query)
                if _is_within(episode.reward, least, most)
            ]

    tasks = [task for task in run_sync(read()) if task is not None]
    if not tasks:
        raise DataError(f"store {public_url(store)} has no such attempt with a known input")
    return list({fingerprint(task): task for task in tasks}.values()) if distinct else tasks


def _is_within(reward: float | None, least: float | None, most: float | None) -> bool:
    """Whether the reward is within the bounds; an unscored attempt is only where there are none."""
    if reward is None:
        return least is None and most is None
    return (least is None or reward >= least) and (most is None or reward <= most)


__all__ = [
    "Epochs",
    "clusters_of",
    "fingerprint",
    "load_distinct",
    "load_tasks",
    "task_id",
    "tasks_from_store",
]
