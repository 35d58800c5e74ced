"""Event loops for plain code (`run_sync`), and by the real clock (`keep_time`); a wait for an event
that has an end (`within`)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar, cast

from lightspan.schema import clock

T = TypeVar("T")


async def within(timeout_s: float | None, event: asyncio.Event) -> bool:
    """Wait for the event; False if it did not come in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


def keep_time(loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop's timers go by the real clock, whatever becomes of `time.monotonic`."""
    if isinstance(loop, asyncio.BaseEventLoop):  # others, as uvloop's, have a clock of their own
        loop.time = clock.monotonic  # type: ignore[method-assign]


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is running already (a notebook).

    An interrupt (Ctrl-C) cancels it and lets it clean up first.

    Raises:
        KeyboardInterrupt: it was interrupted; without the cancellation as its context.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        return _Thread(work).result()
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        pass
    raise KeyboardInterrupt  # a new one: the cancellation behind it says nothing to a person


class _Thread(Generic[T]):
    """A coroutine in an event loop of its own, in a thread of its own."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._result: T | None = None
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightspan-fit")

    def result(self) -> T:
        self._thread.start()
        try:
            # An event, because in Python 3.11 a join that Ctrl-C interrupts takes the thread for
            # ended, and the next join returns at once.
            self._ended.wait()
        except BaseException:
            if self._loop is not None and self._task is not None:
                with contextlib.suppress(RuntimeError):  # it has just ended
                    self._loop.call_soon_threadsafe(self._task.cancel)
            self._ended.wait()
            raise
        finally:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        return cast(T, self._result)

    def _run(self) -> None:
        try:
            self._result = asyncio.run(self._watched())
        except BaseException as error:
            self._failure = error
        finally:
            self._ended.set()

    async def _watched(self) -> T:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await self._work
