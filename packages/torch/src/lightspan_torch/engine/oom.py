"""Recognise out-of-memory errors and explain which setting to lower."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from lightspan.errors import OutOfMemoryError

_OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Memory footprint",
    re.IGNORECASE,
)
"""Messages of torch's allocators (CUDA, CPU), cuBLAS, C++ and transformers' cache. Most of these
errors are plain `RuntimeError`s, which can be recognised only by their message."""
_ALLOCATION: Final = re.compile(
    r"Tried to allocate [\d.]+ [KMG]iB|you tried to allocate \d+ bytes", re.IGNORECASE
)


def is_out_of_memory(error: BaseException | str) -> bool:
    """Return whether an error, or an error message, means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, str | RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def allocation(error: BaseException | str) -> str:
    """Return the size of the failed allocation, in brackets; "" if the message states no size.

    Example: " (it tried to allocate 2.00 GiB)".
    """
    match = _ALLOCATION.search(str(error))
    if match is None:
        return ""
    octets = re.search(r"(\d+) bytes", match[0])
    size = f"{int(octets[1]) / 2**30:.2f} GiB" if octets else match[0].split(" ", 3)[3]
    return f" (it tried to allocate {size})"


@contextmanager
def explained(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """Run the `with` block; replace an out-of-memory error by an `OutOfMemoryError` with advice.

    Args:
        what: the failed operation, such as "updating policy writer on cuda:0".
        advice: returns advice on settings to lower; called only when memory ran out.

    Raises:
        OutOfMemoryError: memory ran out in the `with` block.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        message = f"{what} ran out of memory{allocation(error)}. {advice()}"
        raise OutOfMemoryError(message) from error
