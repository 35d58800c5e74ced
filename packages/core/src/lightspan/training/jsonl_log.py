"""Lines: files that grow by one JSON value a line, by processes that may be killed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from lightspan.errors import ConfigError, StoreError

T = TypeVar("T")


def append(path: Path, values: Iterable[object]) -> None:
    """Add lines; when this returns they survive whatever happens. What a process left that was
    killed while it wrote is cut off.

    Raises:
        StoreError: it cannot be written.
    """
    data = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
    if not data:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("a+b") as file:
            _cut(file.fileno())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror}; see to its disk, then go on with "
            "resume=True (--resume)"
        ) from error


def read(path: Path, kind: type[T]) -> list[T]:
    """Every whole line; none where there is no file.

    Raises:
        ConfigError: the file is damaged, or cannot be read.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    decoder = msgspec.json.Decoder(kind)
    values = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            values.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} is damaged in line {number}: {error}; mend or delete the line"
            ) from error
    return values


def _cut(descriptor: int) -> None:
    """Cut off what stands after the last newline."""
    size = end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 65_536)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start if found < 0 else start + found + 1
        if found >= 0:
            break
    if end != size:
        os.ftruncate(descriptor, end)
