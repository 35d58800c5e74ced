"""Run coroutines from synchronous code, wait with a timeout, and keep timers on the real clock."""

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
    """Wait for an event; return whether it is set.

    Args:
        timeout_s: maximum seconds to wait; None for no maximum.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


def use_real_clock(loop: asyncio.AbstractEventLoop) -> None:
    """Make the timers of `loop` use the real clock even if an app replaces `time.monotonic`."""
    if isinstance(loop, asyncio.BaseEventLoop):  # others, such as uvloop's, use their own clock
        loop.time = clock.monotonic  # type: ignore[method-assign]


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result, also while an event loop is running.

    An event loop is running in a notebook, for example. Ctrl-C cancels the coroutine and waits for
    its clean-up. A second Ctrl-C kills this process and its child processes. If the app has its own
    handler of SIGINT, or if this thread is not the main thread, Ctrl-C does what it did before.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        return _run_in_thread(work)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return asyncio.run(work)  # another handler gets Ctrl-C
    is_interrupted = False

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal is_interrupted
            is_interrupted = True
            # asyncio would raise the second one inside the callback that happens to run, which may
            # leave a lock held or cut the closing short: the process then hangs forever.
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
    raise KeyboardInterrupt  # a new one, without the cancellation as its context


def _end_process(number: int, frame: FrameType | None) -> None:
    """Kill the child processes, then end this process by the signal `number`.

    The children are killed explicitly, because a child that holds the GIL does not notice the end
    of its parent.
    """
    signal.signal(number, signal.SIG_DFL)
    child_processes.kill(child_processes.left_by(os.getpid()))
    os.kill(os.getpid(), number)


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop in a new thread."""
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

    # A daemon thread, so that a coroutine that ignores its cancellation does not keep the
    # notebook's kernel from ending.
    thread = threading.Thread(target=run, name="lightspan-fit", daemon=True)
    try:
        thread.start()
        return result.result()
    except KeyboardInterrupt:
        if thread.ident is not None and not result.done():
            loop, task = started.result()
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(task.cancel)
            result.exception()  # wait for its clean-up
        raise
