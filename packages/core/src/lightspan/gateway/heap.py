"""Memory that is free goes back to the system.

glibc keeps what was freed for whoever asks next, in a heap per thread, and pieces that others
have split are rarely of use again: under requests of every size a process that has allocated no
more than before holds some 350 bytes more after each.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final

import psutil

LOOK_S: Final = 30.0
"""Seconds between two looks at how much the process holds."""
GROWN: Final = 16 * 2**20
"""Bytes that it must have grown by, and by an eighth: a return takes 5 to 10 ms for each 100 MB
that the process holds, in which whoever needs memory waits, the event loop too."""


async def return_memory(look_s: float = LOOK_S) -> None:
    """Give free memory back whenever the process has grown, for ever. Returns at once where the
    system's C library has no such call."""
    give_back = _malloc_trim()
    if give_back is None:
        return
    process = psutil.Process()
    held = process.memory_info().rss
    while True:
        await asyncio.sleep(look_s)
        if process.memory_info().rss > held + max(GROWN, held // 8):
            await asyncio.to_thread(give_back, 0)
            held = process.memory_info().rss


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's: of the heap of every thread, and of its middle too. Python goes on meanwhile."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim
