"""Watchdog process: kills a runner's programs when the runner is gone.

The module runs as a script, with the folder of the attempts' files as its argument. Its standard
input is a pipe with a line `+ID` when a process group starts and `-ID` when it has ended. Only the
runner holds the write end, so the pipe closes however the runner ends, even by `kill -9`. Then the
script kills every group that still runs, and removes the folder. The script needs only the standard
library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def main(folder: str) -> None:
    """Wait until the runner has ended, then kill its process groups and remove `folder`."""
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
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
