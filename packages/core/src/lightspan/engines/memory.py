"""Out of memory: told apart from other failures, and answered with the setting to lower."""

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
"""In messages of torch's allocators (CUDA, CPU), cuBLAS, C++ and transformers' cache."""
_WANTED: Final = re.compile(
    r"Tried to allocate [\d.]+ [KMG]iB|you tried to allocate \d+ bytes", re.IGNORECASE
)


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether an error, or its message, says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, str | RuntimeError) and _SIGNS.search(str(error)) is not None


def wanted(error: BaseException | str) -> str:
    """What the allocator says that it was asked for, in brackets; empty if it does not."""
    found = _WANTED.search(str(error))
    if found is None:
        return ""
    text = found[0]
    octets = re.search(r"(\d+) bytes", text)
    return f" (it tried to allocate {_size(int(octets[1])) if octets else text.split(' ', 3)[3]})"


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


__all__ = ["explained", "is_out_of_memory", "wanted"]
