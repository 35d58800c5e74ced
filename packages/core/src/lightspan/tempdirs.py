"""Folders that are gone with the process that made them, however that ends."""

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
    """A new folder that nobody else reads. `close` removes it; one whose process was killed is
    removed by the next process that makes one of its prefix beside it.

    Args:
        prefix: of its name.
        parent: where it is to be.

    Raises:
        OSError: it cannot be made there.
    """

    def __init__(self, prefix: str, parent: str | Path) -> None:
        _sweep(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock = _locked(self.path)

    def close(self) -> None:
        """Remove it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(parent: str | Path, prefix: str) -> None:
    """Remove what processes that were killed left behind: folders of this prefix that are free."""
    for folder in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():  # to open what is in it could wait for ever
                continue
            with open(folder / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> int:
    """The descriptor of a lock file, which is locked before it can be seen."""
    unseen = folder / f"{_LOCK}-"
    lock = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unseen.rename(folder / _LOCK)
    return lock
