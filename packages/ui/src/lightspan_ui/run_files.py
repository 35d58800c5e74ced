"""Read the files of a run while it trains: only what was appended or replaced is read again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.advantages import Explanation
from lightspan.training.folder import CONFIG, EXPLANATIONS, METRICS, RESULT, REWARDS, RunFolder
from lightspan.training.rewards import Scored

T = TypeVar("T")
Stamp = tuple[int, int, int] | None
"""Inode, size and time of a file's last change; None if there is no file."""

_CHECKED_BYTES: Final = 256
"""Number of bytes before the offset that are read again, to notice that the file was replaced."""
_MAX_CACHED: Final = 64
"""Maximum number of files whose content is kept."""

_decoder: Final = msgspec.json.Decoder(dict[str, Any])


def stamp_of(path: Path) -> Stamp:
    """Return what changes when a file is written or replaced; None if there is no file."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class MetricsTail:
    """The complete lines of a `metrics.jsonl` that grows.

    A resumed run replaces the file by a shorter one; all lines are then read again.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._end = b""
        """The last bytes before the offset."""
        self.lines: list[dict[str, Any]] = []
        self.generation = 0
        """Number of times that all lines were read again."""

    def refresh(self) -> None:
        """Read the lines that were appended. An incomplete last line is left for the next time.

        Raises:
            ConfigError: a line is damaged, or the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                start = max(0, self._offset - len(self._end))
                file.seek(start)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            data = b""
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror}") from error
        if not data.startswith(self._end):
            self._reset()
            self.refresh()
            return
        data = data[len(self._end) :]
        complete = data[: data.rfind(b"\n") + 1]
        lines = [
            self._decode(line, number)
            for number, line in enumerate(complete.split(b"\n")[:-1], len(self.lines) + 1)
        ]
        self.lines += lines
        self._offset += len(complete)
        self._end = (self._end + complete)[-_CHECKED_BYTES:]

    def _reset(self) -> None:
        self._offset, self._end = 0, b""
        self.lines = []
        self.generation += 1

    def _decode(self, data: bytes, number: int) -> dict[str, Any]:
        try:
            line = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._damage(number, str(error)) from error
        if not isinstance(line.get("kind"), str) or type(line.get("step")) is not int:
            raise self._damage(number, "it has no kind or no step")
        return line

    def _damage(self, number: int, reason: str) -> ConfigError:
        return ConfigError(
            f"{self._path} is damaged in line {number}: {reason}; delete the line, or restore a "
            "copy"
        )


class LiveRunFolder(RunFolder):
    """A run's folder whose files are read again only if they have changed.

    It is only read: the methods of `RunFolder` that write are not for it.

    Args:
        path: path of the folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tail = MetricsTail(path / METRICS)
        self._reading = threading.RLock()
        """Held while files are read, which the event loop and a thread do."""
        self._cache: dict[object, tuple[Stamp, Any]] = {}

    def metrics(self) -> list[dict[str, Any]]:
        with self._reading:
            self.tail.refresh()
            return self.tail.lines

    def read_config(self) -> dict[str, Any]:
        return self._cached(CONFIG, super().read_config)

    def read_result(self) -> dict[str, Any] | None:
        return self._cached(RESULT, super().read_result)

    def explanations(self, step: int) -> dict[str, Explanation]:
        read = super().explanations
        return self._cached(f"{EXPLANATIONS}/step-{step:06d}.json", lambda: read(step))

    def rewards(self, name: str) -> dict[str, Scored]:
        read = super().rewards
        return self._cached(f"{REWARDS}/{name}.jsonl", lambda: read(name))

    def pid(self) -> int | None:
        """Return the id of the process that last trained in the folder; None if it is unknown.

        The lock itself is never tested: a trainer that starts at that moment would be refused.
        """
        try:
            return int((self.path / "lock").read_text())
        except (OSError, ValueError):
            return None

    def _cached(self, name: str, read: Callable[[], T]) -> T:
        with self._reading:
            stamp = stamp_of(self.path / name)
            cached = self._cache.get(name)
            if cached is None or cached[0] != stamp:
                cached = stamp, read()
                self._cache.pop(name, None)
                while len(self._cache) >= _MAX_CACHED:
                    self._cache.pop(next(iter(self._cache)))
                self._cache[name] = cached
            value: T = cached[1]
            return value


def is_alive(pid: int, since: float) -> bool:
    """Return whether the process that wrote its `pid` at the time `since` still runs.

    A process that started later has the same id by chance.

    Args:
        pid: id of the process.
        since: time in seconds since the epoch.
    """
    import psutil

    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    try:
        return bool(psutil.Process(pid).create_time() <= since + 1)
    except psutil.Error:
        return True
