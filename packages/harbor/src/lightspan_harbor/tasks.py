"""Read a suite of Harbor tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightspan.errors import DataError

_TASK_FILE = "task.toml"


class HarborTasks:
    """The tasks of a suite: `fit(…, HarborTasks("suite/train"), HarborTasks("suite/val"))`.

    A task is a folder with `task.toml`, `instruction.md`, `environment/` and `tests/`. Each becomes
    a JSON object with its name in the suite as `id`, its absolute `path` and its `instruction`.

    Args:
        suite: folder of tasks, or of one task. `harbor download` gets the suites of others.

    Raises:
        DataError: there is no such folder, or no task in it.
    """

    def __init__(self, suite: str | os.PathLike[str]) -> None:
        root = Path(suite).expanduser().resolve()
        if not root.is_dir():
            raise DataError(
                f"there is no suite {os.fspath(suite)!r}: give a folder of Harbor tasks"
            )
        self._tasks = [_task(root, file.parent) for file in sorted(root.rglob(_TASK_FILE))]
        if not self._tasks:
            raise DataError(
                f"{os.fspath(suite)!r} has no Harbor task: a task is a folder with a {_TASK_FILE}"
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


def _task(root: Path, folder: Path) -> dict[str, Any]:
    name = folder.relative_to(root).as_posix() if folder != root else folder.name
    task: dict[str, Any] = {"id": name, "path": str(folder)}
    instruction = folder / "instruction.md"  # a task of several steps has one in each
    if instruction.is_file():
        task["instruction"] = instruction.read_text("utf-8")
    return task
