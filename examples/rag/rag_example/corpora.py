"""Questions and passages read from other people's data, in one form (`Corpus`).

corpus = musique.read("musique/data", "train")     or documents.read("handbook", "train")
data = corpus.save_index("cache")                  built once for these passages
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightspan.errors import DataError
from rag_example.index import Index, Passage
from rag_example.worlds import Task

Split: TypeAlias = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Questions, and the passages with their answers."""

    name: str
    """Name of the index's folder."""
    tasks: list[Task]
    passages: list[Passage]
    files: list[Path]
    """Files that were read."""
    skipped: list[str]
    """One line per entry or file that was left out: which, and why."""

    def save_index(self, folder: str | Path) -> Path:
        """Build the index of the passages below `folder`, unless it exists.

        Returns:
            The path of the index: `folder` joined with the field `documents` of every task.
        """
        path = Path(folder) / self.name
        if not path.exists():
            Index.build(self.passages).save(path)
        return path


def index_name(kind: str, passages: Sequence[Passage]) -> str:
    """Return the name of an index: `kind`, and a hash of the passages."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(json.dumps(passage).encode())
    return f"{kind}-{digest.hexdigest()[:12]}-index"


def json_lines(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (file name and line number, object) for each line that is not blank.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{file.name}:{number}"
                    yield where, _object(line, where)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    if not isinstance(entry, dict):
        raise DataError(f"{where} is no JSON object: each line has one question")
    return entry


def text_of(entry: Mapping[str, Any], key: str, where: str) -> str:
    """Return a field that must be text and not blank.

    Raises:
        DataError: the field is missing, blank or not text.
    """
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {key} is {value!r}; it has to be a text")
    return value


def texts_of(entry: Mapping[str, Any], key: str, where: str) -> list[str]:
    """Return a field that is a list of texts; an empty list if the field is missing.

    Raises:
        DataError: the field is not a list of texts.
    """
    values = entry.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise DataError(f"{where}: {key} is {values!r}; it has to be a list of texts")
    return values
