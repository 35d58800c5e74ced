"""Read tasks from a folder of Calc-X or GSM8K."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from lightspan.errors import DataError
from lightspan_examples.data import Loaded
from math_example import calc_x, gsm8k
from math_example.records import Record, Split, files_of, read
from math_example.worlds import Task

LAYOUTS: Final[Mapping[str, Callable[[Record], Task | str]]] = {
    calc_x.FIELD: calc_x.task,
    gsm8k.FIELD: gsm8k.task,
}
"""Field of a record → function that reads records with this field."""


def load(directory: Path, split: Split, *, limit: int | None = None) -> Loaded[Task]:
    """Return the tasks of a split of Calc-X or GSM8K, in the order of the files.

    Args:
        directory: the data set's folder; `math_example.records` lists the files that are read.
        limit: maximum number of tasks; None for no limit.

    Raises:
        DataError: no file of the split exists, a file is malformed, or no record can be scored.
    """
    files = files_of(Path(directory), split)
    tasks: list[Task] = []
    skipped: list[str] = []
    records = (record for file in files for record in read(file))
    for record in records:
        if limit is not None and len(tasks) >= limit:
            break
        task = _layout(record)(record)
        if isinstance(task, str):
            skipped.append(f"{record.where}: {task}")
        else:
            tasks.append(task)
    if not tasks:
        names = ", ".join(map(str, files))
        raise DataError(f"no record of {names} can be scored: {skipped[:3]}")
    return Loaded(tasks, files, skipped)


def _layout(record: Record) -> Callable[[Record], Task | str]:
    for field, read_task in LAYOUTS.items():
        if field in record.fields:
            return read_task
    wanted = " nor ".join(f"{field!r}" for field in LAYOUTS)
    raise DataError(f"{record.where} has neither a field {wanted}: neither Calc-X nor GSM8K")
