"""Append-only files of JSON lines that survive a kill of the writing process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from lightspan.errors import ConfigError, StoreError

T = TypeVar("T")


def append(path: Path, values: Iterable[object]) -> None:
    """Append `values` to the file as lines of JSON, and flush them to disk.

    An incomplete last line, which a killed process has left, is deleted first.

    Raises:
        StoreError: the file cannot be written.
    """
    data = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
    if not data:
        return
    with store_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("a+b") as file:
            _cut_incomplete_line(file.fileno())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def read(path: Path, kind: type[T], remedy: str = "delete the line") -> list[T]:
    """Return the values of the complete lines of a JSONL file; empty if the file does not exist.

    Args:
        path: path of the file.
        kind: type of each line's value.
        remedy: advice in the error message about a damaged line.

    Raises:
        ConfigError: a line is not JSON of type `kind`, or the file cannot be read.
    """
    decoder = msgspec.json.Decoder(kind)
    values = []
    for number, line in enumerate((read_bytes(path) or b"").split(b"\n")[:-1], 1):
        try:
            values.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} is damaged in line {number}: {error}; {remedy}, or restore a copy"
            ) from error
    return values


def read_bytes(path: Path) -> bytes | None:
    """Return the content of a file; None if it does not exist.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` raised in the `with` block, which writes `path`, into a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror}; check its disk and its permissions, "
            "then go on with resume=True (--resume)"
        ) from error


def _cut_incomplete_line(descriptor: int) -> None:
    """Truncate a file after its last newline, or to nothing if it has no newline."""
    size = end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 65_536)
        position = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start + position + 1  # `start` if there is no newline
        if position >= 0:
            break
    if end != size:
        os.ftruncate(descriptor, end)
