"""Tasks of the user's data sets as JSON, which is what agents get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightspan.errors import ConfigError, DataError
from lightspan.progress import print_line
from lightspan.schema.records import Json, task_id
from lightspan.training.data import check_ids, json_task


class TypeChanges:
    """Types of task values that JSON does not have, each of which is printed once.

    Args:
        name: name of the data in the line, such as `train_dataset`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._shown: set[str] = set()

    def note(self, given: Any, task: Json, where: str) -> None:
        """Print a line for each type in a task that was not in an earlier one.

        Args:
            given: the task as the user gave it.
            task: the same task as JSON.
            where: place of the task in the user's data.
        """
        changes: dict[str, str] = {}
        _find_changes(given, task, where, changes)
        new = {name: text for name, text in changes.items() if name not in self._shown}
        self._shown |= new.keys()
        if new:
            types = ", ".join(new.values())
            print_line(f"{self._name}: tasks are JSON, so agents get other types: {types}")


def as_task(value: Any, where: str, changes: TypeChanges) -> Json:
    """Return a task as JSON, with numpy arrays as lists.

    Args:
        value: the task.
        where: its place, for error messages.
        changes: prints types that change.

    Raises:
        DataError: the task is not JSON.
    """
    task = json_task(_plain(value, where), where)
    changes.note(value, task, where)
    return task


def as_tasks(dataset: Any, name: str) -> list[Json]:
    """Return the items of a data set as tasks (see `as_task`).

    Args:
        dataset: anything with a length and items by number, except a text or a mapping.
        name: name of the data set in messages.

    Raises:
        ConfigError: `dataset` is None.
        DataError: `dataset` has a wrong type, or a task is not JSON.
    """
    if dataset is None:
        raise ConfigError(f"fit needs {name}: a list of tasks")
    check_no_text(dataset, name)
    try:
        items = [dataset[index] for index in range(len(dataset))]
    except (TypeError, KeyError) as error:
        raise DataError(f"{name} must have a length and items by number: {error}") from error
    changes = TypeChanges(name)
    return [as_task(item, f"{name}[{number}]", changes) for number, item in enumerate(items)]


def distinct_tasks(tasks: Sequence[Json], what: str) -> list[Json]:
    """Return the tasks without duplicates.

    Raises:
        DataError: tasks that differ share an id.
    """
    check_ids(tasks, what, may_repeat=True)
    return list({task_id(task): task for task in tasks}.values())


def check_no_text(dataset: Any, name: str) -> None:
    """Raise `DataError` if a data set is a text (a path or a URL), a mapping or a table.

    Args:
        dataset: what the user passed.
        name: name of the data set in the message.
    """
    if isinstance(dataset, str | bytes | Mapping) or hasattr(dataset, "iloc"):
        hint = ": pass data.to_dict('records')" if hasattr(dataset, "iloc") else ""
        shown = f"{dataset!r:.100}, a " if isinstance(dataset, str | bytes) else ""
        raise DataError(
            f"{name} must be a list of tasks, not {shown}{type(dataset).__name__}{hint}"
        )


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if hasattr(value, "model_dump"):
        raise DataError(f"{where} is a {type(value).__name__}: give {where}.model_dump()")
    to_list = getattr(value, "tolist", None)  # numpy arrays and scalars
    return to_list() if callable(to_list) else value


def _find_changes(given: Any, task: Json, where: str, changes: dict[str, str]) -> None:
    """Add the types in `given` that differ from those in `task`: type → description."""
    if isinstance(given, dict) and isinstance(task, dict):
        for (key, item), part in zip(given.items(), task.values(), strict=True):
            _find_changes(item, part, f"{where}[{key!r}]", changes)
    elif isinstance(given, list) and isinstance(task, list):
        for number, (item, part) in enumerate(zip(given, task, strict=True)):
            _find_changes(item, part, f"{where}[{number}]", changes)
    elif type(given) is not type(task):
        kind, name = type(task).__name__, type(given).__qualname__
        if (module := type(given).__module__) != "builtins":
            name = f"{module}.{name}"
        changes.setdefault(name, f"{kind} in place of {name} (such as {where})")
