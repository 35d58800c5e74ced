"""Threads beside the event loop, for what takes long: other calls go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

_Result = TypeVar("_Result")

SMALL: Final = 8_192
"""Bytes that are worked on at once, in a millisecond or two: a thread costs as much."""
THREADS: Final = 2
"""For each kind of work: what fills the ones does not hold up the others."""


class Workers:
    """A few threads for one kind of work.

    Args:
        kind: of work, for the threads' names.
    """

    def __init__(self, kind: str) -> None:
        self._pool = ThreadPoolExecutor(THREADS, f"lightspan-{kind}")

    async def run(
        self, function: Callable[..., _Result], *arguments: object, size: int = SMALL + 1
    ) -> _Result:
        """What the function returns; called at once if so many bytes are small."""
        if size <= SMALL:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Give up what nobody waits for any more. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
