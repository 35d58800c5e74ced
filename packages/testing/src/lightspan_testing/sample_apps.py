"""Apps for the suite of runners: `lightspan_testing.sample_apps:NAME`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any


def right(task: dict[str, Any]) -> float:
    """Return the number in the task as the reward."""
    return float(task["number"])


async def waits(task: dict[str, Any]) -> float:
    """Create the file that the task names, and wait for another file."""
    Path(task["begun"]).touch()
    while not Path(task["go"]).exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return 1.0


def dies_once(task: dict[str, Any]) -> float:
    """End the process once: if the task's marker file `died` is missing, create it and exit."""
    file = task.get("died")
    if file is not None and not Path(file).exists():
        Path(file).touch()
        os._exit(7)
    return float(task["number"])


def dies(task: dict[str, Any]) -> float:
    """End the process in every attempt, if the task contains `dies`."""
    if task.get("dies"):
        os._exit(7)
    return float(task["number"])
