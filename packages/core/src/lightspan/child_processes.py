"""Find and end the processes that a process has started and would leave behind.

Those that have a session of their own are left out: a `Command`'s programs have a watchdog, and
what an app detaches is to live on. Where there is no `/proc` nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int
    started: str
    """With the pid, it tells a process from any other."""


def left_by(pid: int) -> list[_Process]:
    """Return every process below this one, in its session."""
    processes = [found for path in _PROC.glob("[0-9]*") if (found := _read(path)) is not None]
    session = next((each.session for each in processes if each.pid == pid), None)
    below, inside = {pid}, list[_Process]()
    while more := [p for p in processes if p.parent in below and p.pid not in below]:
        below.update(each.pid for each in more)
        inside += more
    return [each for each in inside if each.session == session]


def kill(processes: Iterable[_Process]) -> None:
    """End those that are still there."""
    for each in processes:
        now = _read(_PROC / str(each.pid))
        if now is not None and now.started == each.started:
            with contextlib.suppress(OSError):
                os.kill(each.pid, signal.SIGKILL)


def _read(path: Path) -> _Process | None:
    """None: it has ended, or is not ours to look at."""
    try:
        fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return _Process(int(path.name), int(fields[1]), int(fields[3]), fields[19])
