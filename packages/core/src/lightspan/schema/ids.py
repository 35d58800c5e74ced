"""Make random hex digits for ids, with the operating system's generator.

Digits are read for many ids at a time, because a call of `os.urandom` takes longer than everything
else in making a span.
"""

from __future__ import annotations

import os
from typing import Final

_DIGITS: Final = 16
_IDS_PER_READ: Final = 256

_ids: Final[list[str]] = []


def random_digits() -> str:
    """Return 16 unused hex digits (64 random bits). Thread-safe."""
    try:
        return _ids.pop()
    except IndexError:
        digits = os.urandom(_IDS_PER_READ * _DIGITS // 2).hex()
        ids = [digits[start : start + _DIGITS] for start in range(0, len(digits), _DIGITS)]
        _ids.extend(ids[1:])
        return ids[0]


os.register_at_fork(after_in_child=_ids.clear)  # else parent and child would use the same ids
