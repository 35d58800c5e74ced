"""Wait in tests until a condition holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any]) -> None:
    """Poll until `condition()` is true; only pytest's timeout limits the wait."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.002)
