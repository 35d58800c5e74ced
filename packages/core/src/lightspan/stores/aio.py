"""Event loops for plain code (`run_sync`), and by the real clock (`use_real_clock`); a wait for an
event that has an end (`wait_for_event`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

from lightspan import child_processes
from lightspan.schema import clock

T = TypeVar("T")


async def wait_for_event(timeout_s: float | None, event: asyncio.Event) -> bool:
    """Wait for the event; False if it did not come in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


def use_real_clock(loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop's timers go by the real clock, whatever becomes of `time.monotonic`."""
    if isinstance(loop, asyncio.BaseEventLoop):  # others, as uvloop's, have a clock of their own
        loop.time = clock.monotonic  # type: ignore[method-assign]


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is running already (a notebook).

    Ctrl-C cancels it and lets it clean up first; a second one ends the process and its child
    processes.

    Raises:
        KeyboardInterrupt: it was interrupted; without the cancellation as its context.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        return _run_in_thread(work)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return asyncio.run(work)  # somebody else handles Ctrl-C
    is_interrupted = False

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal is_interrupted
            is_interrupted = True
            # asyncio would raise the second one in whatever callback runs, where it can leave a
            # lock taken or cut the closing short: the process then hung for ever
            signal.signal(signal.SIGINT, _end_process)
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(task.cancel)

        signal.signal(signal.SIGINT, interrupt)
        return await work

    try:
        return asyncio.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and not is_interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt  # a new one: the cancellation behind it says nothing to a person


def _end_process(number: int, frame: FrameType | None) -> None:
    """End this process by the signal, and its child processes: one that keeps the GIL would not
    notice that its parent is gone."""
    signal.signal(number, signal.SIG_DFL)
    child_processes.kill(child_processes.left_by(os.getpid()))
    os.kill(os.getpid(), number)


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
