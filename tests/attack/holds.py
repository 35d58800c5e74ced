"""The longest step for which one thread keeps all of Python to itself, by what it costs the CPU.

Other threads, and with them the event loop, wait until such a step is over: a function in C that
does not let go of Python, or what it frees at its end. The clock is that of the thread, so that a
busy machine counts for little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final

LETS_GO: Final = frozenset({"encode_batch_fast"})
"""Functions in C that run beside Python: other threads go on meanwhile."""


def longest_hold(work: Callable[[], object]) -> tuple[float, str]:
    """(seconds of CPU, between which two calls or returns) of the longest step."""
    clock, longest, last = time.thread_time, (0.0, ""), (0.0, "", False)

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal longest, last
        now = clock()
        took, goes_on = now - last[0], last[2] and event == "c_return"
        name = argument.__name__ if event.startswith("c_") else frame.f_code.co_name
        place = f"{event} {name}"
        if took > longest[0] and not goes_on:
            longest = took, f"{last[1]} -> {place}"
        last = clock(), place, event == "c_call" and name in LETS_GO

    last = clock(), "the start", False
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return longest
