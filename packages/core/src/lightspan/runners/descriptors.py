"""The open files that a runner process needs, which an app may close as if they were its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_ALL: Final = "/dev/fd"


class Descriptors:
    """Descriptors that must stay what they are.

    A number that was closed may be another file's the next moment: what is written to it would
    damage that one. So a process that has lost any of them ends.
    """

    def __init__(self, number: int) -> None:
        self._kept = {number: _identity(number)}

    def keep_file(self, path: Path) -> None:
        """Keep those, too, that are open on a SQLite store."""
        files = []
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                status = os.stat(f"{path}{suffix}")
                files.append((status.st_dev, status.st_ino))
        for number in map(int, os.listdir(_ALL)):
            if (identity := _identity(number)) in files:
                self._kept[number] = identity

    @property
    def lost(self) -> bool:
        """Whether any was closed."""
        return any(_identity(number) != kept for number, kept in self._kept.items())


def _identity(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino
