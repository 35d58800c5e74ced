"""Read the records of a split of a published data set, from the files of its folder.

DIR/train.jsonl  DIR/test.jsonl                          one JSON object on each line
DIR/train.parquet  DIR/test.parquet                      as agent-lightning's tutorial has them
DIR/data/train-*.parquet  DIR/main/train-*.parquet       as on the Hugging Face hub
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from lightspan.errors import DataError

Split: TypeAlias = Literal["train", "test"]

PATTERNS: Final[Sequence[str]] = (
    "{split}.parquet",
    "{split}.jsonl",
    "data/{split}-*.parquet",
    "main/{split}-*.parquet",
)
"""Patterns of a split's files; only the first pattern that finds files is used."""


class Record(NamedTuple):
    """A record of a data set, with its position."""

    where: str
    """File and line or row of the record, counted from 1."""
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a field that must be text and not blank.

        Raises:
            DataError: the field is missing, not text, or blank.
        """
        if name not in self.fields:
            names = ", ".join(map(str, self.fields)) or "none"
            raise DataError(f"{self.where} has no field {name!r}; its fields: {names}")
        value = self.fields[name]
        if not isinstance(value, str):
            raise DataError(f"{self.where}: field {name!r} is {value!r}, not a text")
        if not value.strip():
            raise DataError(f"{self.where}: field {name!r} is empty")
        return value


def files_of(directory: Path, split: Split) -> list[Path]:
    """Return the files of a split, sorted.

    Raises:
        DataError: `directory` does not exist or has no file of the split.
    """
    if not directory.is_dir():
        raise DataError(f"--data {directory}: there is no such folder")
    for pattern in PATTERNS:
        files = sorted(directory.glob(pattern.format(split=split)))
        if files:
            return files
    wanted = ", ".join(pattern.format(split=split) for pattern in PATTERNS)
    raise DataError(f"--data {directory}: no file of the split {split}; one of {wanted}")


def read(file: Path) -> Iterator[Record]:
    """Yield the records of a file, in order.

    Raises:
        DataError: the file cannot be read, or a line of it is not a JSON object.
    """
    rows = _parquet(file) if file.suffix == ".parquet" else _json_lines(file)
    for number, row in rows:
        where = f"{file.name}:{number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{where} is {row!r:.40}, not a record")
        yield Record(where, row)


def _json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _json(f"{file.name}:{number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _json(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def _parquet(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise DataError(f"reading {file} needs pyarrow: pip install pyarrow") from error
    try:
        rows = parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(f"{file} cannot be read: {error}") from error
    yield from enumerate(rows, 1)
