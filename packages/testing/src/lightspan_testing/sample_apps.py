"""Apps for the suite of runners, wherever these are: `lightspan_testing.sample_apps:NAME`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any


def right(task: dict[str, Any]) -> float:
    """Returns the task's number."""
    return float(task["number"])


async def right_later(task: dict[str, Any]) -> float:
    """The same, on a loop."""
    await asyncio.sleep(0.01)
    return float(task["number"])


async def waits(task: dict[str, Any]) -> float:
    """Says that it is there, and waits until a file is there too."""
    Path(task["begun"]).touch()
    while not Path(task["go"]).exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return 1.0


def dies_once(task: dict[str, Any]) -> float:
    """Ends its process at the first try of a task that has a file for that."""
    file = task.get("died")
    if file is not None and not Path(file).exists():
        Path(file).touch()
        os._exit(7)
    return float(task["number"])


def dies(task: dict[str, Any]) -> float:
    """Ends its process each time, where the task says so."""
    if task.get("dies"):
        os._exit(7)
    return float(task["number"])
