"""Run coroutines from synchronous code, wait with a timeout, and keep timers on the real clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from types import FrameType
from typing import Any, Final, TypeVar

from lightspan import child_processes
from lightspan.errors import AppError, RewardError
from lightspan.schema import clock

T = TypeVar("T")
_DEFAULT_HANDLERS: Final[Mapping[signal.Signals, Any]] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
"""Handlers of the signals that end a process, in a process that has set none."""


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
    """Run a coroutine to its end and return its result, even if an event loop is running.

    In a notebook, for example, an event loop is always running.

    Ctrl-C or SIGTERM cancels the coroutine and waits for its clean-up. After SIGTERM the process
    then ends. A second signal kills this process and its child processes at once. If the app has
    its own handler of a signal, or if this thread is not the main thread, this function does not
    change what the signal does.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        return _run_in_thread(work)
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)
    handlers = {n: h for n, h in _DEFAULT_HANDLERS.items() if signal.getsignal(n) is h}
    interrupt_number = 0

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal interrupt_number
            interrupt_number = number
            # asyncio would raise the second one inside the callback that happens to run, which may
            # leave a lock held or cut the closing short: the process then hangs forever.
            for each in handlers:
                signal.signal(each, _end_process)
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(task.cancel)

        for each in handlers:
            signal.signal(each, interrupt)
        return await work

    try:
        return asyncio.run(main())
    except (AppError, RewardError) as error:  # whose traceback would show lightspan alone
        raise error.with_traceback(None) from error.__cause__
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and not interrupt_number:
            raise
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    if interrupt_number == signal.SIGTERM:
        _end_process(interrupt_number, None)
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
