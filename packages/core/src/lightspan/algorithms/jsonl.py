"""Files of JSON values, one a line: tasks, and chats to imitate."""

from __future__ import annotations

import codecs
from pathlib import Path

import msgspec

from lightspan.errors import DataError
from lightspan.schema.records import Json


def read_jsonl(path: Path, what: str, one: str) -> list[Json]:
    """The values of a file. A path that names none may be meant as such a value itself.

    Args:
        what: the data's name in errors, such as `train`.
        one: what a line holds, such as `task`.

    Raises:
        DataError: there is no such file, or a line of it is not JSON.
    """
    try:
        # split at newlines only: text in JSON may hold other characters that end lines
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        advice = "" if path.suffix else f" ({what} given as text is the path of a .jsonl file)"
        raise DataError(f"{what}: {path} cannot be read: {error.strerror}{advice}") from error
    values: list[Json] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values.append(msgspec.json.decode(line))
        except msgspec.DecodeError as error:
            raise DataError(
                f"{what}: {path}, line {number} is not JSON, of which each line must be one {one}: "
                f"{error}"
            ) from error
    [alone] = values if len(values) == 1 else [None]
    if isinstance(alone, list) and not (one == "chat" and _are_messages(alone)):
        raise DataError(
            f"{what}: {path} is one list of {len(alone)}: a file has a {one} on each line; "
            f"give the list itself, {what}=json.load(open({str(path)!r}))"
        )
    return values


def _are_messages(values: list[Json]) -> bool:
    """Whether the list is one chat."""
    return all(isinstance(each, dict) and "role" in each for each in values)
