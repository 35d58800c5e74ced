"""Assign each rank one of the GPUs that CUDA_VISIBLE_DEVICES names."""

from __future__ import annotations

import os
from itertools import takewhile
from typing import Final

from lightspan.errors import ConfigError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def cuda_device(device: str) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` that lets a rank see only `device`.

    Example: for "cuda:1", "5" if this process's `CUDA_VISIBLE_DEVICES` is "4,5".

    Raises:
        ConfigError: this process's `CUDA_VISIBLE_DEVICES` does not include the device.
    """
    number = int(device.partition(":")[2] or 0)
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return str(number)
    # CUDA ignores all entries from the first invalid one on
    names = list(takewhile(_is_device_name, map(str.strip, visible.split(","))))
    if number >= len(names):
        raise ConfigError(
            f"Verl: {VISIBLE}={visible!r} shows {len(names)} devices, but a rank needs {device!r}: "
            "show more, or use fewer ranks"
        )
    return names[number]


def _is_device_name(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))
