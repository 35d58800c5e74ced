"""The GPUs that CUDA_VISIBLE_DEVICES shows, of which each rank is to have one."""

from __future__ import annotations

import os
from itertools import takewhile
from typing import Final

from lightspan.errors import ConfigError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def card(device: str) -> str:
    """Return the `CUDA_VISIBLE_DEVICES` of a rank on a device.

    Raises:
        ConfigError: this process sees fewer devices.
    """
    number = int(device.partition(":")[2] or 0)
    seen = os.environ.get(VISIBLE)
    if seen is None:
        return str(number)
    cards = list(takewhile(_is_card, map(str.strip, seen.split(","))))
    if number >= len(cards):
        raise ConfigError(
            f"Verl: {VISIBLE}={seen!r} shows {len(cards)} devices, and a rank is to be on "
            f"{device!r}: show more, or take fewer ranks"
        )
    return cards[number]


def _is_card(named: str) -> bool:
    """Whether CUDA takes it for one: what follows one that it does not, it does not see either."""
    return named.isdecimal() or named.startswith(("GPU-", "MIG-"))
