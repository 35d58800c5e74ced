"""Names of devices."""

from __future__ import annotations

import re
from typing import Final

from lightspan.errors import ConfigError

_DEVICE: Final = re.compile(r"cpu|cuda(:\d+)?")


def check_device_name(device: str) -> None:
    """Raise `ConfigError` for a kind of device that models cannot be on. Loads no torch."""
    if _DEVICE.fullmatch(device) is None:
        raise ConfigError(
            f'device={device!r} is unknown: use "cpu", or "cuda" for a GPU ("cuda:1" for the '
            "second)"
        )
