"""A clock that runs only while all tasks sleep.

Waiting for models then takes no real time, and the work of a store takes the time that it takes.

    time = VirtualTime(tick_s=0.01)
    time.start(work(time))        # a task; it may `await time.sleep(8.0)`
    await time.over()

While a task works (or waits for the store), the clock stands still. When all tasks sleep, it jumps
to the next tick at which a task wakes. All tasks that wake in this tick wake together.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Coroutine
from typing import Any, Final


class VirtualTime:
    """A virtual clock for the tasks of one event loop and for a store.

    Args:
        tick_s: seconds to whose multiple the time of waking is rounded up.
    """

    _EPOCH: Final = 1.8e9

    def __init__(self, tick_s: float = 0.01) -> None:
        self._tick_s = tick_s
        self._tick = 0
        self._awake = 0
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._slept = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self) -> float:
        """Return the virtual time, in seconds since the epoch."""
        return self._EPOCH + self._tick * self._tick_s

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; the clock stands still while it does not sleep."""
        self._awake += 1
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` of virtual time. Only tasks that `start` made may call this."""
        wakes = self._tick + max(1, math.ceil(seconds / self._tick_s))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slept += 1
        heapq.heappush(self._sleepers, (wakes, self._slept, future))
        self._rest()
        await future

    async def over(self) -> None:
        """Wait until every task has ended; raise the first error of a task."""
        while self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.discard(task)
                task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)
        self._rest()

    def _rest(self) -> None:
        """Record that a task sleeps or has ended; if all others sleep too, advance the clock."""
        self._awake -= 1
        if self._awake == 0 and self._sleepers:
            self._tick = self._sleepers[0][0]
            while self._sleepers and self._sleepers[0][0] == self._tick:
                self._awake += 1
                heapq.heappop(self._sleepers)[2].set_result(None)
