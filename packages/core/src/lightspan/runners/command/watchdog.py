"""A process beside a runner that ends the runner's programs when the runner is gone.

It is run as a script, with the folder of the task files as its argument. What it is told comes over
its standard input, whose other end only the runner holds: `+ID` a process group began, `-ID` it has
ended. That pipe closes however the runner ends, `kill -9` included; then every group that is left
is killed and the folder removed. It needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main(folder: str) -> None:
    """Listen until the runner is gone, then end what it left."""
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
    _remove(folder)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            os.unlink(entry.path)
        os.rmdir(folder)


if __name__ == "__main__":
    main(sys.argv[1])
