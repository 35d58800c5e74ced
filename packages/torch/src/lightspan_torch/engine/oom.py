"""Running out of memory: told from other failures, and answered with the setting to lower."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from lightspan.errors import OutOfMemoryError

_SIGNS: Final = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Memory footprint",
    re.IGNORECASE,
)
"""What torch's allocators (CUDA, CPU), cuBLAS, C++ and transformers' cache say; most of them raise
a plain `RuntimeError`, which nothing but its message tells from others."""
_WANTED: Final = re.compile(
    r"Tried to allocate [\d.]+ [KMG]iB|you tried to allocate \d+ bytes", re.IGNORECASE
)


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether an error, or its message, says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, str | RuntimeError) and _SIGNS.search(str(error)) is not None


def wanted(error: BaseException | str) -> str:
    """How much the allocator says that it was asked for, in brackets; empty if it does not say."""
    said = _WANTED.search(str(error))
    if said is None:
        return ""
    octets = re.search(r"(\d+) bytes", said[0])
    size = _size(int(octets[1])) if octets else said[0].split(" ", 3)[3]
    return f" (it tried to allocate {size})"


@contextmanager
def explained(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error into one that says what to do.

    Args:
        what: was done, such as "updating policy writer on cuda:0".
        advice: makes the settings to lower; only asked for when memory ran out.

    Raises:
        OutOfMemoryError: in place of torch's.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        message = f"{what} ran out of memory{wanted(error)}. {advice()}"
        raise OutOfMemoryError(message) from error


def _size(octets: int) -> str:
    return f"{octets / 2**30:.2f} GiB" if octets >= 2**30 else f"{octets / 2**20:.0f} MiB"
