"""Watchdog process: kills a runner's programs when the runner is gone.

It runs as a script, with the folder of the task files as its argument. The runner writes to its
standard input: `+ID` when a process group starts, `-ID` when it has ended. Only the runner holds
the other end of that pipe, so the pipe closes however the runner ends, `kill -9` included. Then
every group that still runs is killed and the folder removed. The script needs only the standard
library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main(folder: str) -> None:
    """Read until the runner is gone, then kill its process groups and remove its task files."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            os.unlink(entry.path)
        os.rmdir(folder)


if __name__ == "__main__":
    main(sys.argv[1])
