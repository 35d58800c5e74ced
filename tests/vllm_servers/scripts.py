"""Run training scripts in processes that tests kill and resume."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

LATEST_S = 900.0


@contextmanager
def training(script: Path, folder: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script; at the end, kill it and check that its child processes have ended."""
    command = [sys.executable, str(script), str(folder), *map(str, arguments)]
    with folder.with_suffix(".log").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        started = [] if process.poll() is not None else psutil.Process(process.pid).children(True)
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, "processes outlive the trainer"


def until(what: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `what()` is true; fail if the process ends before."""
    latest = time.monotonic() + LATEST_S
    while not what():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < latest, log.read_text()[-4000:]
        time.sleep(0.2)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(folder: Path) -> int:
    return max((int(line["step"]) for line in lines_of(folder)), default=0)
