"""Spider: questions about real schemas, read from its published folder or the tutorial's files.

    DIR/train_spider.json, train_others.json, dev.json     the published lists of questions
    DIR/train_spider.parquet, test_dev_500.parquet         the lists of agent-lightning's tutorial
    DIR/database/<db>/<db>.sqlite                          the databases
    DIR/test_database/<db>/<db>.sqlite                     databases of held-out questions, if apart

An entry needs `db_id`, `question` and `query`. If both kinds of lists exist, the parquet files are
read. Spider has one database per schema, so a wrong query may have the right result by chance; the
reward is the usual execution accuracy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from lightspan.errors import DataError
from lightspan_examples.data import Loaded
from sql_example.database import QueryError, execute, schema_text
from sql_example.worlds import Task

Split = Literal["train", "test"]

LISTS: Final[Mapping[Split, Sequence[tuple[str, ...]]]] = {
    "train": (("train_spider.parquet",), ("train_spider.json", "train_others.json")),
    "test": (("test_dev_500.parquet",), ("test_dev.parquet",), ("dev.json",)),
}
"""Split → alternatives, the preferred first. All files of one alternative are read."""

DATABASES: Final[Mapping[Split, Sequence[str]]] = {
    "train": ("database",),
    "test": ("test_database", "database"),
}
"""Split → folders in which its databases are looked for, in this order."""

_FIELDS: Final = ("db_id", "question", "query")
_ORDER_BY: Final = re.compile(r"\border\s+by\b", re.IGNORECASE)


def load(directory: Path, split: Split, *, limit: int | None = None) -> Loaded[Task]:
    """Return the questions of a split whose gold query runs, in the order of the files.

    Args:
        directory: Spider's folder.
        split: `test` reads Spider's development set, because its test set had no labels at first.
        limit: maximum number of tasks; None for no limit.

    Raises:
        DataError: a list or a database is missing, a list is malformed, or no question can be
            scored.
    """
    files = _files(Path(directory), split)
    tasks: list[Task] = []
    skipped: list[str] = []
    for where, entry in (pair for file in files for pair in _entries(file)):
        if limit is not None and len(tasks) >= limit:
            break
        database = _database(Path(directory), split, entry["db_id"], where)
        reason = _unscorable(database, entry["query"])
        if reason is None:
            tasks.append(_task(Path(directory), database, entry, where))
        else:
            skipped.append(f"{where}: {reason}")
    if not tasks:
        raise DataError(f"no question of {', '.join(map(str, files))} can be scored: {skipped[:3]}")
    return Loaded(tasks, files, skipped)


def _files(directory: Path, split: Split) -> list[Path]:
    if not directory.is_dir():
        raise DataError(f"--data {directory}: there is no such folder")
    for names in LISTS[split]:
        files = [directory / name for name in names if (directory / name).is_file()]
        if files:
            return files
    wanted = ", ".join(name for names in LISTS[split] for name in names)
    raise DataError(f"--data {directory}: no list of questions for {split}; one of {wanted}")


def _entries(file: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield (file name and index, entry) for each question."""
    try:
        questions = _parquet(file) if file.suffix == ".parquet" else json.loads(file.read_bytes())
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(f"{file} cannot be read: {error}") from error
    if not isinstance(questions, list):
        raise DataError(f"{file} is no list of questions")
    for number, entry in enumerate(questions):
        where = f"{file.name}[{number}]"
        fields = entry if isinstance(entry, Mapping) else {}
        lacking = [name for name in _FIELDS if not isinstance(fields.get(name), str)]
        if lacking:
            raise DataError(f"{where} has no text {', '.join(lacking)}")
        yield where, fields


def _parquet(file: Path) -> list[Any]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise DataError(f"reading {file} needs pyarrow: pip install pyarrow") from error
    rows: list[Any] = parquet.read_table(file).to_pylist()
    return rows


def _database(directory: Path, split: Split, db_id: str, where: str) -> Path:
    names = [Path(folder) / db_id / f"{db_id}.sqlite" for folder in DATABASES[split]]
    if db_id in (".", "..") or Path(db_id).name != db_id:
        raise DataError(f"{where}: {db_id!r} is no name of a database")
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise DataError(
        f"{where}: no database of {db_id!r}: {' or '.join(map(str, names))} in {directory}"
    )


def _unscorable(database: Path, gold: str) -> str | None:
    """Return why a question cannot be scored; None if it can."""
    try:
        result = execute(database, gold)
    except (QueryError, ValueError) as error:
        return f"its query fails on {database.name}: {error}"
    return f"its query has over {len(result.rows)} rows" if result.truncated else None


def _task(directory: Path, database: Path, entry: Mapping[str, str], where: str) -> Task:
    return Task(
        id=where,
        question=entry["question"],
        schema=_schema(database),
        databases=[str(database.relative_to(directory))],
        gold=entry["query"],
        ordered=_orders(entry["query"]),
    )


@cache
def _schema(database: Path) -> str:
    return schema_text(database)


def _orders(query: str) -> bool:
    """Return whether the outermost query has an ORDER BY; one in parentheses does not count."""
    outer, depth = [], 0
    for part in re.split(r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|[()])", query):
        depth += (part == "(") - (part == ")")
        if depth == 0 and part[:1] not in ("'", '"', ")"):
            outer.append(part)
    return _ORDER_BY.search(" ".join(outer)) is not None
