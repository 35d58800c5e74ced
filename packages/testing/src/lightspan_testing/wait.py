"""Waiting for what others do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any]) -> None:
    """Wait until the condition holds (pytest's time limit ends a wait in vain)."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.002)


__all__ = ["until"]
