"""Run a coroutine from plain code, also where an event loop is running already."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


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
    raise KeyboardInterrupt  # anew: the cancellation behind it says nothing to a person


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
            self._ended.wait()  # a join that was interrupted takes the thread for ended (3.11)
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
