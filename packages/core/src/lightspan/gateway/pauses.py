"""What would hold up every call: looks through the whole memory, threads that wait for a turn."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

TURN_S: Final = 0.0001
"""Seconds for which a thread may keep Python from those that wait for it, by default 0.005. A
forward pass lets go of Python at each of its operations: beside two threads that work on large
requests a call of one token took 0.4 to 1 s, and takes 0.1 to 0.2 s. Without such requests calls
are as fast either way."""


@contextmanager
def short_pauses() -> Iterator[None]:
    """Nothing of ours keeps all of Python to itself for long, from now to the end."""
    with _short_turns(), _settled_memory():
        yield


@contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def _settled_memory() -> Iterator[None]:
    """What is there now stays, and is not looked through for what may be freed: that takes half a
    second for libraries and models, whenever large requests come, and all of Python waits. What is
    made from now on is looked through as ever."""
    was_settled = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if was_settled:  # by whoever called us
            _settle_again()
        else:
            gc.unfreeze()


def _settle_again() -> None:
    """All that is there stays, but what was settled and has become of no use."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
