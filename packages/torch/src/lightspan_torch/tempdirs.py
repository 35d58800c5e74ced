"""Temporary folders that are removed even if their process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_LOCK: Final = "lock"


class OwnedTempDir:
    """A new folder, only for this process, that `close` removes.

    If the process is killed before `close`, the folder stays. The next process that creates an
    `OwnedTempDir` with the same `prefix` and `parent` removes that folder.

    Args:
        prefix: prefix of the folder's name.
        parent: folder in which the new folder is created.

    Raises:
        OSError: the folder cannot be created.
    """

    def __init__(self, prefix: str, parent: str | Path) -> None:
        _sweep(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = _create_lock(self.path)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: str | Path, prefix: str) -> None:
    """Remove folders in `parent` whose name begins with `prefix` and whose process has ended."""
    for folder in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():  # opening another user's file could block
                continue
            with open(folder / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the owner runs
                shutil.rmtree(folder, ignore_errors=True)


def _create_lock(folder: Path) -> int:
    """Create a lock file in `folder`, and return its file descriptor.

    The file is locked before it gets its final name, so that no other process finds it unlocked.
    """
    unlocked = folder / f"{_LOCK}-"
    lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unlocked.rename(folder / _LOCK)
    return lock
