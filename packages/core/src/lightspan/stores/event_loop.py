"""Event loops for plain code (`run_sync`), and by the real clock (`keep_time`); a wait for an event
that has an end (`within`)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

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

    Ctrl-C cancels it and lets it clean up first; a second one interrupts that.

    Raises:
        KeyboardInterrupt: it was interrupted; without the cancellation as its context.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        return _run_in_thread(work)
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        pass
    raise KeyboardInterrupt  # a new one: the cancellation behind it says nothing to a person


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in an event loop of its own, in a thread of its own."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
    result: Future[T] = Future()

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await work

    def run() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:
            result.set_exception(error)

    # a daemon: what does not end after a second Ctrl-C must not keep the kernel from ending
    thread = threading.Thread(target=run, name="lightspan-fit", daemon=True)
    try:
        thread.start()
        return result.result()
    except KeyboardInterrupt:
        if thread.ident is not None and not result.done():
            loop, task = started.result()
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)
            result.exception()  # wait until it has cleaned up
        raise
