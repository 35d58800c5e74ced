"""What an open store in SQL has: who writes, who reads, and the moves bound to their tables."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from lightspan.errors import StoreClosedError
from lightspan.schema.records import Report
from lightspan.stores import _leases, _state_machine
from lightspan.stores._encoding import PackedCall, PackedRollout, PackedSpan
from lightspan.stores._leases import Claimed, ClaimRequest
from lightspan.stores._sql.group_commit import GROUP_COST, Work
from lightspan.stores._sql.tables import ReadTables, WriteTables

T = TypeVar("T")
R = TypeVar("R")

CHUNK: Final = 128
"""Items that one transaction takes at most of one call."""
_PAGE: Final = 4096


def cost_of(item: object) -> int:
    """What an item costs; what is packed says how many bytes it has."""
    return 1 + int(getattr(item, "size", 0)) // _PAGE


def in_chunks(items: Sequence[T]) -> Iterator[tuple[list[T], int]]:
    """The items cut so that each chunk fits a short transaction, with what each costs."""
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
    """A store's connections and their threads, of one process.

    The writer's methods take items and answer per item (`jobs.Work`); they run in a transaction.

    Args:
        moving: the tables in which rollouts and attempts move.
        adding: those to which spans and calls are added; perhaps the same.
        reader: whatever was committed.
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
        self._read_thread = ThreadPoolExecutor(1, "lightspan-store-read")

    @abstractmethod
    def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> Awaitable[list[R]]:
        """Write the items; their answers once they are committed. Raises `StoreClosedError`."""

    @abstractmethod
    def stop(self) -> None:
        """Finish what is under way and let go of what is open."""

    @abstractmethod
    def _query(self, query: Callable[[], R]) -> R:
        """Run a query of the reader, in its thread; explain what goes wrong."""

    async def read(self, query: Callable[[], R]) -> R:
        """Return the result of a query of the reader, run in the reader's thread.

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
        """Bind a move to these tables and their clock."""
        return lambda items: move(self.moving, items, self.moving.now())

    def claim(self, items: Sequence[ClaimRequest]) -> list[Claimed | None]:
        """Per request what it gets; None if so many leases had run out that there may be more."""
        now = self.moving.now()
        if _leases.expire(self.moving, CHUNK, now) == CHUNK:
            return [None] * len(items)
        return [_leases.claim(self.moving, request, now) for request in items]

    def expire(self, limits: Sequence[int]) -> list[int]:
        return [_leases.expire(self.moving, limit, self.moving.now()) for limit in limits]

    def prune(self, items: Sequence[tuple[float, int]]) -> list[int]:
        """Per (seconds ago, limit) how many rollouts were forgotten."""
        now = self.moving.now()
        return [self.moving.prune(now - older_than_s, limit) for older_than_s, limit in items]

    def mark_damaged(self, items: Sequence[tuple[str, str]]) -> list[None]:
        return _state_machine.mark_damaged(self.moving, items)

    def announce(self, items: Sequence[tuple[str, bytes]]) -> list[None]:
        now = self.adding.now()
        return self.adding.put_peers([(peer_id, now, body) for peer_id, body in items])

    # --- the reader's checks of a batch that is too large for one transaction -------------
    def check_new(self, items: Sequence[PackedRollout]) -> None:
        """Raises `ConflictError`."""
        _state_machine.new_ones(self.reader, items)

    def check_reports(self, items: Sequence[Report]) -> None:
        """Raises `IllegalMoveError` or `NotFoundError`."""
        _state_machine.check_reports(self.reader, items)

    def check_spans(self, items: Sequence[PackedSpan]) -> None:
        """Raises `NotFoundError`."""
        _state_machine.find_attempts(self.reader, [item.attempt_id for item in items])

    def check_calls(self, items: Sequence[PackedCall]) -> None:
        """Raises `NotFoundError`."""
        self.check_spans([item.span for item in items])
