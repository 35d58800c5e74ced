"""How many values a MessagePack body holds, before they are made.

Of bytes that are small integers, or empty lists, decoding makes objects of fifty times their size,
in one step for which all of Python waits.
"""

from __future__ import annotations

from typing import Final

_SIZES: Final = {
    **dict.fromkeys((0xCC, 0xD0), 2),
    **dict.fromkeys((0xCD, 0xD1, 0xDC, 0xDE), 3),
    **dict.fromkeys((0xCA, 0xCE, 0xD2, 0xDD, 0xDF), 5),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 9),
    **{0xD4 + power: 2 + 2**power for power in range(5)},
}
"""By first byte: of numbers, of fixed extensions, and of the heads of lists and maps."""
_COUNTED: Final = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}
"""Of bytes, extensions and texts: the bytes that say how long they are, and those of a type."""


def has_more_values(body: bytes, most: int) -> bool:
    """Whether it holds more than so many. A step of Python for each value, between which others
    have their turn; of what is no MessagePack it says anything."""
    if len(body) <= most:
        return False
    position, values = 0, 0
    while position < len(body) and values <= most:
        first = body[position]
        values += 1
        if 0xA0 <= first <= 0xBF:  # a short text
            position += 1 + (first & 0x1F)
        elif first in _COUNTED:
            width, extra = _COUNTED[first]
            length = int.from_bytes(body[position + 1 : position + 1 + width], "big")
            position += 1 + width + extra + length
        else:
            position += _SIZES.get(first, 1)
    return values > most


__all__ = ["has_more_values"]
