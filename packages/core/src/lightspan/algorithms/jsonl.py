"""JSONL files of tasks and chats."""

from __future__ import annotations

import codecs
from pathlib import Path

import msgspec

from lightspan.errors import DataError
from lightspan.schema.records import Json


def read_jsonl(path: Path, what: str, one: str) -> list[Json]:
    """Return the JSON values of a file, one per line; empty lines are skipped.

    Args:
        path: path of the file.
        what: name of the data in error messages, such as `train`.
        one: name of one line's value in error messages: `task` or `chat`.

    Raises:
        DataError: the file cannot be read, a line is not JSON, or the file is one list of all tasks
            or chats instead of one per line.
    """
    try:
        # split at \n only, because JSON texts may contain other line separators
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        # a text without suffix was perhaps not meant as a path
        advice = "" if path.suffix else f" ({what} given as text is the path of a .jsonl file)"
        raise DataError(f"{what}: {path} cannot be read: {error.strerror}{advice}") from error
    values: list[Json] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values.append(msgspec.json.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
            raise DataError(
                f"{what}: {path}, line {number} is not {kind}; each line must be one {one}: {error}"
            ) from error
    [only] = values if len(values) == 1 else [None]
    if not isinstance(only, list):
        return values
    if one != "chat" or not all(isinstance(value, dict) and "role" in value for value in only):
        raise DataError(
            f"{what}: {path} is one list of {len(only)}: a file has a {one} on each line; "
            f"give the list itself, {what}=json.load(open({str(path)!r}))"
        )
    return values
