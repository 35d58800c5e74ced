"""Waking coroutines of any event loop from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightspan.stores.aio import wait_for_event


class Signal:
    """A hint that something happened; each waiter looks for itself what."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()

    def notify(self) -> None:
        """Wake every waiter; callable from any thread."""
        # Read without the lock, as each write passes here: who registers after this look has not
        # looked at the store yet, and so misses nothing.
        if not self._waiters:
            return
        with self._lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wake()

    @contextmanager
    def waiter(self) -> Iterator[Waiter]:
        """A waiter that misses nothing from here on. Needs a running event loop."""
        waiter = Waiter()
        with self._lock:
            self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters.discard(waiter)


class Waiter:
    """One waiting coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        with suppress(RuntimeError):  # its event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> None:
        """Return when woken since the last wait, or after the time."""
        await wait_for_event(timeout_s, self._event)
        self._event.clear()
