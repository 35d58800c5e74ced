"""Threads beside the event loop, for what takes long: other calls go on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

_Result = TypeVar("_Result")

SMALL: Final = 8_192
"""Bytes that are worked on at once, in a millisecond or two: a thread costs as much."""
THREADS: Final = 2
"""For each kind of work: what fills the ones does not hold up the others."""

LARGE: Final = 2**18
"""Bytes beyond which work of any kind is done one at a time. It has steps that keep all of Python
for up to 0.05 s: of several threads each would have its step before the event loop has its turn."""
_turn: Final = threading.Lock()
"""Whose large work is done."""


class Workers:
    """A few threads for one kind of work.

    Args:
        kind: of work, for the threads' names.
        threads: how many.
        turn: with which others of these take turns at what is large; usually all do.
    """

    def __init__(
        self, kind: str, threads: int = THREADS, turn: threading.Lock | None = None
    ) -> None:
        self._turn = _turn if turn is None else turn
        self._pool = ThreadPoolExecutor(threads, f"lightspan-{kind}")
        self._large = ThreadPoolExecutor(1, f"lightspan-large-{kind}")
        """Of its own: who waits for a turn takes no place from what is shorter."""

    async def run(
        self, function: Callable[..., _Result], *arguments: object, size: int = SMALL + 1
    ) -> _Result:
        """What the function returns; called at once if so many bytes are small."""
        if size <= SMALL:
            return function(*arguments)
        loop = asyncio.get_running_loop()
        if size > LARGE:
            return await loop.run_in_executor(
                self._large, partial(self._in_turn, function, *arguments)
            )
        return await loop.run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Give up what nobody waits for any more. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)

    def _in_turn(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        with self._turn:
            return function(*arguments)
