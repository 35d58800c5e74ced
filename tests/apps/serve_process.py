"""`lightspan serve` as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def serving(folder: Path, *arguments: str, **environment: str) -> Iterator[tuple[str, list[str]]]:
    """Its origin, and the lines that it prints; then stopped by SIGTERM."""
    command = [sys.executable, "-m", "lightspan.cli", "serve", str(folder), *arguments]
    served = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    lines: list[str] = []
    assert served.stdout is not None
    try:
        for line in served.stdout:
            lines.append(line.rstrip())
            if ready := re.match(r"serving .* at (http\S+)/v1 ", line):
                yield ready[1], lines
                break
        else:
            pytest.fail("\n".join(lines))
    finally:
        served.send_signal(signal.SIGTERM)
        rest, _ = served.communicate(timeout=30)
        lines.extend(rest.splitlines())
    assert served.returncode == 0, lines
