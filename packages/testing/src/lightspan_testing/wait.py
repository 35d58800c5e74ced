"""Wait in tests until a condition holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any]) -> None:
    """Poll until `condition()` is true.

    There is no time limit except pytest's.
    """
    while True:
        if condition():
            return
        await asyncio.sleep(0.002)
