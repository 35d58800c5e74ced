"""What is asked at the same time travels together: a request costs more than what most of them ask.

What is asked in one turn of the event loop goes at once, together. Who comes while `AT_ONCE` are on
their way waits for one to come back, and goes with whoever waits then. Each has an answer of its
own, but all wait for the slowest: what reads a lot goes by itself (`Operation.joins`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from lightspan.stores.remote.operations import MOST_TOGETHER

R = TypeVar("R")

AT_ONCE: Final = 2
"""Batches of one process on their way."""
_MOST_BYTES: Final = 2**20
"""Of a batch, but for what is larger by itself."""


class Item(NamedTuple):
    """One operation that is asked."""

    name: str
    body: bytes


class Batches(Generic[R]):
    """Sends items, several at a time.

    Args:
        send: sends them in one request; returns the answer of each.
    """

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[Sequence[R]]]) -> None:
        self._send = send
        self._waiting: deque[tuple[Item, asyncio.Future[R]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    async def sent(self, item: Item) -> R:
        """The item's answer. Raises what sending it raised."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._senders) < AT_ONCE:
            sender = asyncio.create_task(self._send_all())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await future

    async def _send_all(self) -> None:
        while batch := self._next():
            try:
                answers = await self._send([item for item, _ in batch])
                pairs = list(zip(batch, answers, strict=True))
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in pairs:
                if not future.done():  # or who asked has gone
                    future.set_result(answer)

    def _next(self) -> list[tuple[Item, asyncio.Future[R]]]:
        """The next ones to send; empty if nobody waits."""
        batch, size = list[tuple[Item, asyncio.Future[R]]](), 0
        while self._waiting and len(batch) < MOST_TOGETHER:
            item, future = self._waiting[0]
            if batch and size + len(item.body) > _MOST_BYTES:
                break
            self._waiting.popleft()
            if not future.done():
                batch.append((item, future))
                size += len(item.body)
        return batch
