"""Wake coroutines of any event loop from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightspan.stores.aio import wait_for_event


class Signal:
    """Wake waiting coroutines when a store may have changed. Each then queries the store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()

    def notify(self) -> None:
        """Wake all waiters, from any thread."""
        # Every write comes here, so the set is read without the lock. A waiter that registers after
        # this read has not queried the store yet, so it misses nothing.
        if not self._waiters:
            return
        with self._lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wake()

    @contextmanager
    def waiter(self) -> Iterator[Waiter]:
        """Yield a waiter for the running event loop. Each `notify` in the `with` block wakes it."""
        waiter = Waiter()
        with self._lock:
            self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters.discard(waiter)


class Waiter:
    """A coroutine that waits for a `Signal`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> None:
        """Wait until `wake` is called, at most `timeout_s` seconds.

        If `wake` was called since the last wait, return at once.
        """
        await wait_for_event(timeout_s, self._event)
        self._event.clear()
