"""Run `lightspan serve` as a process."""

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
    """Serve a folder; yield the server's URL and the lines that it prints; stop it by SIGTERM."""
    with _started(r"serving .* at (http\S+)/v1 ", [str(folder), *arguments], environment) as served:
        yield served


@contextmanager
def serving_store(url: str, *arguments: str, **environment: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a store; yield its URL for `open_store` and the lines that it prints; stop it by
    SIGTERM.
    """
    with _started(
        r"serving the store .* at (http\S+) ", ["--store", url, *arguments], environment
    ) as served:
        yield served


@contextmanager
def _started(
    ready_line: str, arguments: list[str], environment: dict[str, str]
) -> Iterator[tuple[str, list[str]]]:
    command = [sys.executable, "-m", "lightspan.cli", "serve", "--port", "0", *arguments]
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
            if ready := re.match(ready_line, line):
                yield ready[1], lines
                break
        else:
            pytest.fail("\n".join(lines))
    finally:
        served.send_signal(signal.SIGTERM)
        rest, _ = served.communicate(timeout=30)
        lines.extend(rest.splitlines())
    assert served.returncode == 0, lines
