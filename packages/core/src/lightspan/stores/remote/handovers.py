"""From a caller's event loop to the thread that has the sockets, and back, several at a time.

Another thread is woken by a write to a pipe, and waits for Python's lock: that costs more than most
of what is handed over. So what one turn of a loop asks goes over together, and what is answered in
one turn of the thread's loop comes back together.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from lightspan.errors import StoreClosedError
from lightspan.stores.remote.operations import Operation


class Question(NamedTuple):
    """What somebody asks, and who waits for the answer."""

    operation: Operation
    body: bytes
    lease_s: float | None
    """Of a heartbeat."""
    future: asyncio.Future[bytes]
    """Of the loop that asks."""


Answered = tuple[asyncio.Future[bytes], asyncio.Task[bytes]]


class Handovers:
    """What is asked from any event loop, for one loop that does it.

    Args:
        loop: that does it, in a thread of its own.
        begin: called there for each question; returns the task whose result is the answer.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, begin: Callable[[Question], asyncio.Task[bytes]]
    ) -> None:
        self._loop: Final = loop
        self._begin: Final = begin
        self._lock = threading.Lock()
        """Guards the two below; the others are the thread's."""
        self._asked: dict[asyncio.AbstractEventLoop, list[Question]] = {}
        """By each loop in its present turn."""
        self._closed = ""
        """Why nothing is taken any more."""
        self._answered: list[Answered] = []
        self._tasks: dict[asyncio.Future[bytes], asyncio.Task[bytes]] = {}
        """By who waits for them."""

    def asked(
        self, operation: Operation, body: bytes, lease_s: float | None
    ) -> asyncio.Future[bytes]:
        """The answer to come. Whoever cancels it takes back what was asked."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        with self._lock:
            if self._closed:
                raise StoreClosedError(self._closed)
            group = self._asked.setdefault(loop, [])
            group.append(Question(operation, body, lease_s, future))
            if len(group) == 1:  # tasks that are ready to run may add to it first
                loop.call_soon(self._hand_over, loop)
        future.add_done_callback(self._left)
        return future

    def close(self, why: str) -> None:
        """Hand over what was asked, and take nothing more: that raises a `StoreClosedError`."""
        with self._lock:
            self._closed = why
            groups, self._asked = list(self._asked.values()), {}
        for group in groups:
            self._loop.call_soon_threadsafe(self._take, group)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:  # held until it is over there: `close` comes before it, or after
            group = self._asked.pop(loop, [])
            if group:
                self._loop.call_soon_threadsafe(self._take, group)

    def _left(self, future: asyncio.Future[bytes]) -> None:
        if future.cancelled():
            with suppress(RuntimeError):  # closed: nothing is under way any more
                self._loop.call_soon_threadsafe(self._cancel, future)

    # --- in the thread --------------------------------------------------------------------
    def _take(self, group: Sequence[Question]) -> None:
        for asked in group:
            if not asked.future.cancelled():
                task = self._tasks[asked.future] = self._begin(asked)
                task.add_done_callback(partial(self._done, asked.future))

    def _cancel(self, future: asyncio.Future[bytes]) -> None:
        task = self._tasks.get(future)
        if task is not None:
            task.cancel()

    def _done(self, future: asyncio.Future[bytes], task: asyncio.Task[bytes]) -> None:
        del self._tasks[future]
        self._answered.append((future, task))
        if len(self._answered) == 1:  # what else is answered in this turn goes along
            self._loop.call_soon(self.give_back)

    def give_back(self) -> None:
        """Have those who asked find their answers."""
        answered, self._answered = self._answered, []
        by_loop: dict[asyncio.AbstractEventLoop, list[Answered]] = {}
        for future, task in answered:
            by_loop.setdefault(future.get_loop(), []).append((future, task))
        for loop, some in by_loop.items():
            with suppress(RuntimeError):  # it is closed: nobody waits any more
                loop.call_soon_threadsafe(_tell, some)


def _tell(answered: Sequence[Answered]) -> None:
    for future, task in answered:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if future.done():
            continue  # whoever asked has gone
        if isinstance(error, asyncio.CancelledError):
            future.cancel()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())
