"""Apps for the tests of runners, which import them as `lightspan_testing.sample_apps:NAME`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any


def right(task: dict[str, Any]) -> float:
    """Return the number in the task as the reward."""
    return float(task["number"])


async def waits(task: dict[str, Any]) -> float:
    """Create the file `begun` that the task names, and wait for the file `go`."""
    Path(task["begun"]).touch()
    while not Path(task["go"]).exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return 1.0


def dies_once(task: dict[str, Any]) -> float:
    """End the process in the first attempt only.

    The file that the task names as `died` marks that this has happened.
    """
    file = task.get("died")
    if file is not None and not Path(file).exists():
        Path(file).touch()
        os._exit(7)
    return float(task["number"])


def dies(task: dict[str, Any]) -> float:
    """End the process in every attempt if `dies` is set in the task."""
    if task.get("dies"):
        os._exit(7)
    return float(task["number"])
