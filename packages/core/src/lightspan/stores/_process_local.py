"""Base class of stores that open their connections in each process that uses them."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - else a thread imports it: see _sql/queries.py
import os
from abc import abstractmethod
from typing import Final, Generic, Protocol, TypeVar

from lightspan.errors import StoreClosedError, StoreError
from lightspan.stores.protocol import Store


class Opened(Protocol):
    """The connections and threads of a store in one process."""

    @property
    def pid(self) -> int:
        """Id of the process that opened the store."""

    def stop(self) -> None:
        """Finish the writes under way and close the connections."""


H = TypeVar("H", bound=Opened)

_inherited: Final[list[Opened]] = []
"""Connections that a parent process opened. The list keeps the garbage collector from closing them
here, which would drop the parent's locks on a file or end its session with a server."""


class OpenedStore(Store, Generic[H]):
    """A store that is opened in each process that uses it, and again after a fork.

    Args:
        name: the store's name in errors.
    """

    read_only = False
    """Whether the store is only read, and each method that writes raises `StoreError`. Set it
    before `open`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._connections: H | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def _start(self) -> H:
        """Open the connections; runs in a thread."""

    async def open(self) -> None:
        if self._connections is not None and self._connections.pid != os.getpid():
            _inherited.append(self._connections)
            self._connections = None
        if self._connections is None:
            self._connections = await asyncio.to_thread(self._start)

    async def close(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None and connections.pid == os.getpid():
            try:
                await asyncio.to_thread(connections.stop)
            except RuntimeError:  # the interpreter is shutting down and starts no thread
                connections.stop()

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(
                f"store {self._name} was opened for reading only: to change it, open it without "
                "read_only"
            )

    @property
    def _opened(self) -> H:
        """The open connections; raises `StoreClosedError` if there are none."""
        if self._connections is None:
            raise StoreClosedError(f"store {self._name} is closed: open it first")
        if self._connections.pid != os.getpid():
            raise StoreClosedError(
                f"store {self._name} was opened before this process was forked: open it again here"
            )
        return self._connections
