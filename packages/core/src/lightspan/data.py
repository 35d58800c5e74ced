"""Tasks: a sequence of JSON values, or a JSONL file of them."""

from __future__ import annotations

import codecs
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightspan.errors import DataError
from lightspan.records import Json, fingerprint, task_id


def load_tasks(tasks: Iterable[Json] | str | Path, what: str = "tasks") -> list[Json]:
    """Tasks as a list, checked.

    Args:
        tasks: any iterable of JSON values, or the path of a `.jsonl` file.
        what: the data's name in errors, such as `train`.

    Raises:
        DataError: no task at all, one that is not JSON, or a malformed line of the file.
    """
    if isinstance(tasks, str | Path):
        found = _read_jsonl(Path(tasks), what)
    elif isinstance(tasks, Mapping) or not isinstance(tasks, Iterable):
        raise DataError(
            f"{what} must be a sequence of tasks or the path of a .jsonl file, not "
            f"{type(tasks).__name__}: {tasks!r:.200}"
        )
    else:
        found = list(tasks)
    if not found:
        raise DataError(f"{what}: there is no task; give at least one")
    return [_checked(task, f"{what}[{index}]") for index, task in enumerate(found)]


def load_distinct(tasks: Iterable[Json] | str | Path, what: str = "tasks") -> list[Json]:
    """As `load_tasks`, for tasks that are compared one by one.

    Raises:
        DataError: two of them are equal, or have one id.
    """
    found = load_tasks(tasks, what)
    [(most, count)] = Counter(task_id(task) for task in found).most_common(1)
    if count > 1:
        first, second = [i for i, task in enumerate(found) if task_id(task) == most][:2]
        raise DataError(
            f"{what}[{first}] and {what}[{second}] are equal, or have one id ({most}): held-out "
            "rewards are compared task by task, so make them differ"
        )
    return found


def _read_jsonl(path: Path, what: str) -> list[Json]:
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise DataError(f"{what}: {path} cannot be read: {error.strerror}") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tasks.append(msgspec.json.decode(line))
        except msgspec.DecodeError as error:
            raise DataError(f"{what}: {path}, line {number} is not JSON: {error}") from error
    return tasks


def _checked(task: Any, where: str) -> Json:
    """The task as JSON would give it back."""
    try:
        plain = msgspec.to_builtins(task, str_keys=True)
        return json.loads(json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise DataError(
            f"{where} is not JSON: {error}. A task is made of dicts, lists, text, finite numbers, "
            f"booleans and None: {task!r:.200}"
        ) from error


class Epochs:
    """Tasks in shuffled epochs: none is used again before all were used.

    Args:
        tasks: of one epoch.
        seed: of the order; each epoch has its own.
    """

    def __init__(self, tasks: Sequence[Json], seed: int) -> None:
        self.tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def take(self, start: int, count: int) -> list[Json]:
        """The tasks at the places `start` and following; places go on over all epochs."""
        return [self._at(place) for place in range(start, start + count)]

    def _at(self, place: int) -> Json:
        epoch, position = divmod(place, len(self.tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self.tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self.tasks[self._order[position]]


__all__ = ["Epochs", "fingerprint", "load_distinct", "load_tasks", "task_id"]
