"""An open SQL store: its writer and its reader, and the operations that they run on the tables."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from lightspan.errors import StoreClosedError
from lightspan.stores import _leases, _state_machine
from lightspan.stores._leases import Claimed, ClaimRequest
from lightspan.stores._sql.group_commit import GROUP_COST, Work
from lightspan.stores._sql.tables import ReadTables, WriteTables

T = TypeVar("T")
R = TypeVar("R")

CHUNK: Final = 128
"""Maximum number of items of one call in one transaction."""
_PAGE: Final = 4096
"""Bytes of data that cost as much as one item."""


def cost_of(item: object) -> int:
    """Return how much of a transaction's limit `GROUP_COST` it takes to write an item.

    It is 1, plus 1 for each full page of `_PAGE` bytes in the item's `size`, if it has one.
    """
    return 1 + int(getattr(item, "size", 0)) // _PAGE


def in_chunks(items: Sequence[T]) -> Iterator[tuple[list[T], int]]:
    """Yield the items in chunks that each fit a short transaction, with the cost of each chunk."""
    chunk: list[T] = []
    cost = 0
    for item in items:
        chunk.append(item)
        cost += cost_of(item)
        if len(chunk) == CHUNK or cost >= GROUP_COST:
            yield chunk, cost
            chunk, cost = [], 0
    if chunk:
        yield chunk, cost


class OpenDatabase(ABC):
    """The connections of a store in one process, and their threads.

    Each method that writes takes a list of items and returns one result per item. It runs inside a
    transaction (`group_commit.Work`).

    Args:
        moving: tables through which rollouts and attempts change their status.
        adding: tables to which spans and calls are added; may be the same object as `moving`.
        reader: tables for reading, in the state that was committed last.
    """

    def __init__(self, moving: WriteTables, adding: WriteTables, reader: ReadTables) -> None:
        self.pid: Final = os.getpid()
        self.moving: Final = moving
        self.adding: Final = adding
        self.reader: Final = reader
        self.enqueue: Final = self._timed(_state_machine.enqueue)
        self.start: Final = self._timed(_state_machine.start)
        self.report: Final = self._timed(_state_machine.report)
        self.cancel: Final = self._timed(_state_machine.cancel)
        self.heartbeat: Final = self._timed(_leases.heartbeat)
        self.mark_damaged: Final = partial(_state_machine.mark_damaged, moving)
        self._read_thread = ThreadPoolExecutor(1, "lightspan-store-read")

    @abstractmethod
    def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> Awaitable[list[R]]:
        """Run `work` on `items` in a transaction; return its results once they are committed.

        Args:
            cost: sum of the items' costs (`cost_of`).

        Raises:
            StoreClosedError: the store was closed.
        """

    @abstractmethod
    def stop(self) -> None:
        """Finish the writes under way and close the connections."""

    @abstractmethod
    def _query(self, query: Callable[[], R]) -> R:
        """Run a query in the current thread, and convert the database's errors to the store's."""

    async def read(self, query: Callable[[], R]) -> R:
        """Run a query in the reader's thread and return its result.

        Raises:
            StoreClosedError: the store was closed.
        """
        try:
            future = self._read_thread.submit(self._query, query)
        except RuntimeError:  # the executor was shut down
            raise StoreClosedError from None
        return await asyncio.wrap_future(future)

    # --- the writer's work ----------------------------------------------------------------
    def _timed(self, move: Callable[[WriteTables, Sequence[T], float], list[R]]) -> Work[T, R]:
        """Return a function of items that calls `move` with the tables, the items and the time."""
        return lambda items: move(self.moving, items, self.moving.now())

    def claim(self, items: Sequence[ClaimRequest]) -> list[Claimed | None]:
        """End expired leases, then claim rollouts for each request.

        If more expired leases may be left, claim nothing and return None for each request. The
        caller then repeats the call.
        """
        now = self.moving.now()
        if _leases.expire(self.moving, CHUNK, now) == CHUNK:
            return [None] * len(items)
        return [_leases.claim(self.moving, request, now) for request in items]

    def expire(self, limits: Sequence[int]) -> list[int]:
        return [_leases.expire(self.moving, limit, self.moving.now()) for limit in limits]

    def prune(self, items: Sequence[tuple[float, int]]) -> list[int]:
        """Delete finished rollouts; return for each item how many rollouts were deleted.

        Args:
            items: pairs (age in seconds, limit). Each pair deletes at most `limit` rollouts that
                ended longer ago than the age.
        """
        now = self.moving.now()
        return [self.moving.prune(now - older_than_s, limit) for older_than_s, limit in items]

    def announce(self, items: Sequence[tuple[str, bytes]]) -> list[None]:
        now = self.adding.now()
        return self.adding.put_peers([(peer_id, now, body) for peer_id, body in items])
