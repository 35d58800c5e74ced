"""Send operations that are requested at about the same time in one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from lightspan_gateway.remote_store.rpc import MAX_BATCH

R = TypeVar("R")
Item = tuple[str, bytes]
"""Name of an operation, and its encoded arguments."""


class RequestBatcher(Generic[R]):
    """A queue that sends its items in batches of at most `MAX_BATCH`.

    Items that are added in the same turn of the event loop are sent together.

    Args:
        send: function that sends a batch and returns the answer to each item.
    """

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[Sequence[R]]]) -> None:
        self._send = send
        self._queue: list[tuple[Item, asyncio.Future[R]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, item: Item) -> R:
        """Send an item in the next batch, and return the answer to the item.

        If the batch fails, its error is raised for each of its items.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._queue.append((item, future))
        if len(self._queue) == 1:
            loop.call_soon(self._flush)
        return await future

    def _flush(self) -> None:
        queue = [entry for entry in self._queue if not entry[1].done()]
        self._queue = []
        for start in range(0, len(queue), MAX_BATCH):
            task = asyncio.create_task(self._send_batch(queue[start : start + MAX_BATCH]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send_batch(self, batch: Sequence[tuple[Item, asyncio.Future[R]]]) -> None:
        try:
            answers = await self._send([item for item, _ in batch])
            pairs = list(zip(batch, answers, strict=True))
        except Exception as error:
            for _, future in batch:
                if not future.done():  # else the caller was cancelled
                    future.set_exception(error)
            return
        for (_, future), answer in pairs:
            if not future.done():
                future.set_result(answer)
