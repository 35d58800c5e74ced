"""Waiting in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any]) -> None:
    """Poll until the condition holds (pytest's timeout ends a vain wait)."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.002)
