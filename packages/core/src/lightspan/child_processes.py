"""Find and kill the child processes that a process would leave running; block their signals.

Processes in another session are left out. They are programs that lightspan-programs started, which
a watchdog ends, and processes that an app has detached so that they continue. Without `/proc`
nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int
    started: str
    """Start time as in `/proc`. A pid may be reused, so pid and start time identify a process."""


def left_by(pid: int) -> list[_Process]:
    """Return all descendants of the process `pid` that are in its session."""
    processes = [process for path in _PROC.glob("[0-9]*") if (process := _read(path)) is not None]
    session = next((process.session for process in processes if process.pid == pid), None)
    pids, descendants = {pid}, list[_Process]()
    while children := [p for p in processes if p.parent in pids and p.pid not in pids]:
        pids.update(process.pid for process in children)
        descendants += children
    return [process for process in descendants if process.session == session]


def kill(processes: Iterable[_Process]) -> None:
    """Kill those of `processes` that still run."""
    for process in processes:
        current = _read(_PROC / str(process.pid))
        if current is not None and current.started == process.started:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)


@contextmanager
def blocked_signals(*signals: signal.Signals) -> Iterator[None]:
    """Block `signals` in this thread during the block. Processes started in it inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read(path: Path) -> _Process | None:
    """Return the process of a folder in `/proc`; None if the process has ended or is unreadable."""
    try:
        fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return _Process(int(path.name), int(fields[1]), int(fields[3]), fields[19])
