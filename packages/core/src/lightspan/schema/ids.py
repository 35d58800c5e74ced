"""Random digits for ids, from the system.

They are fetched many at a time: asking for those of one id costs more than all else that is done
to make a span of it.
"""

from __future__ import annotations

import os
from typing import Final

_DIGITS: Final = 16
_MAX_CONCURRENT: Final = 256

_fetched: Final[list[str]] = []


def random_digits() -> str:
    """16 hex digits that nobody was given before; 64 random bits. Thread-safe."""
    try:
        return _fetched.pop()
    except IndexError:
        several = os.urandom(_MAX_CONCURRENT * _DIGITS // 2).hex()
        ids = [several[start : start + _DIGITS] for start in range(0, len(several), _DIGITS)]
        _fetched.extend(ids[1:])
        return ids[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fetched.clear)  # or parent and child would share them
