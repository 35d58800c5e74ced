"""A store that is opened in each process that uses it."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - else a thread imports it: see _sql/statements.py
import os
from abc import abstractmethod
from typing import Final, Generic, Protocol, TypeVar

from lightspan.errors import StoreClosedError
from lightspan.stores.protocol import Store


class Opened(Protocol):
    """What one process has open: connections, and their threads."""

    @property
    def pid(self) -> int:
        """The process that opened it."""

    def stop(self) -> None:
        """Finish what is under way and let go of what is open."""


H = TypeVar("H", bound=Opened)

_inherited: Final[list[Opened]] = []
"""What a parent process had open. Kept for good: to close it here, as the garbage collector would,
drops the parent's locks on a file, or ends its session with a server."""


class OpenedStore(Store, Generic[H]):
    """Open it in each process that uses it; after a fork, again.

    Args:
        place: what errors call the store.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._held: H | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def _start(self) -> H:
        """Open it, in a thread."""

    async def open(self) -> None:
        if self._held is not None and self._held.pid != os.getpid():
            _inherited.append(self._held)
            self._held = None
        if self._held is None:
            self._held = await asyncio.to_thread(self._start)

    async def close(self) -> None:
        held, self._held = self._held, None
        if held is not None and held.pid == os.getpid():
            try:
                await asyncio.to_thread(held.stop)
            except RuntimeError:  # the interpreter is on its way out, and starts nothing any more
                held.stop()

    @property
    def _opened(self) -> H:
        """What is open. Raises `StoreClosedError`."""
        if self._held is None:
            raise StoreClosedError(f"store {self._place} is closed: open it first")
        if self._held.pid != os.getpid():
            raise StoreClosedError(
                f"store {self._place} was opened before this process was forked: open it again here"
            )
        return self._held
