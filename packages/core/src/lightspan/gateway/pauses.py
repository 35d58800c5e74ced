"""What would hold up every call: the garbage collector's looks through all that is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_memory() -> Iterator[None]:
    """What is there now stays, and is not looked through for what may be freed: that takes half a
    second for libraries and models, whenever large requests come, and all of Python waits. What is
    made from now on is looked through as ever."""
    was_settled = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_settled:  # by whoever called us
            gc.collect()
            gc.freeze()
