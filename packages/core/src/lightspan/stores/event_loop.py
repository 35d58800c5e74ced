"""Event loops for plain code (`run_sync`), and by the real clock (`keep_time`); a wait for an event
that has an end (`within`).

Ctrl-C cancels what `run_sync` runs, which then closes. A second one lets it go on closing for
`END_S` and then ends the process, whatever it waits for. It is never raised in the loop, as asyncio
does: it would hit any line of any callback, between a lock's taking and its `with`, and cancel the
closing itself, so that what comes later in it (the gateway) is closed while what comes first (the
runners) goes on.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Generic, TypeVar, cast

from lightspan.schema import clock

T = TypeVar("T")

END_S: Final = 2.0
"""How long a second Ctrl-C lets what is closing go on."""
_LOOK_S: Final = 1.0
_endings: Final[list[Callable[[float], None]]] = []


@contextlib.contextmanager
def at_second_interrupt(end: Callable[[float], None]) -> Iterator[None]:
    """In the block, a second Ctrl-C has `end` called, in another thread, with the time by
    `clock.monotonic` until which it may let what it ends go on."""
    _endings.append(end)
    try:
        yield
    finally:
        _endings.remove(end)


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

    An interrupt (Ctrl-C) cancels it and lets it clean up first. A second one ends the process, by
    SIGINT; in a notebook it ends the work's processes and is raised, whatever the work waits for.

    Raises:
        KeyboardInterrupt: it was interrupted; without the cancellation as its context.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        return _Thread(work).result()
    interrupts = _Interrupts()
    with interrupts.watched():
        try:
            return asyncio.run(interrupts.followed(work))
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not interrupts.count:
                raise
    raise KeyboardInterrupt  # a new one: the cancellation behind it says nothing to a person


class _Interrupts:
    """What Ctrl-C does to a coroutine in the main thread, unless somebody else handles it."""

    def __init__(self) -> None:
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._over = threading.Event()
        self._is_watching = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Handle Ctrl-C in the block."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        self._is_watching = True
        try:
            yield
        finally:
            self._over.set()
            signal.signal(signal.SIGINT, signal.default_int_handler)

    async def followed(self, work: Coroutine[Any, Any, T]) -> T:
        """The work, which Ctrl-C cancels."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        with _woken_by_signals(self._loop) if self._is_watching else contextlib.nullcontext():
            return await work

    def _interrupt(self, number: int, frame: object) -> None:
        self.count += 1
        if self.count == 1:
            if self._task is None or self._loop is None or self._task.done():
                raise KeyboardInterrupt
            self._task.cancel()
            self._loop.call_soon_threadsafe(lambda: None)  # it may be waiting
            return
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a third one ends us at once
        # No `threading.Thread`: it takes locks, which the code that was interrupted may hold.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._end, ())

    def _end(self) -> None:
        """End the process, unless what is closing is closed by then."""
        end_at = clock.monotonic() + END_S
        _call_endings(end_at)
        if not self._over.wait(end_at - clock.monotonic()):
            os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Have each signal wake the loop of the main thread. One that comes between its last line and
    its falling asleep interrupts nothing, and would be seen when something else wakes it."""
    waking, woken = socket.socketpair()
    with waking, woken:
        waking.setblocking(False)
        woken.setblocking(False)
        loop.add_reader(woken, _drain, woken)
        before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            now = signal.set_wakeup_fd(-1)
            # the app may have set its own meanwhile (`loop.add_signal_handler`)
            signal.set_wakeup_fd(before if now == waking.fileno() else now)
            loop.remove_reader(woken)


def _drain(woken: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        woken.recv(4096)


def _call_endings(end_at: float) -> None:
    for end in tuple(_endings):  # of another thread, which may leave one of these blocks
        with contextlib.suppress(Exception):  # the next one has to be called too
            end(end_at)


class _Thread(Generic[T]):
    """A coroutine in an event loop of its own, in a thread of its own."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._result: T | None = None
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ended = threading.Event()
        # a daemon: what does not end after a second interrupt must not keep the kernel from ending
        self._thread = threading.Thread(target=self._run, name="lightspan-fit", daemon=True)

    def result(self) -> T:
        try:
            self._thread.start()
            self._await_end()
        except BaseException:
            if self._thread.ident is not None:
                self._close()
            raise
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return cast(T, self._result)

    def _await_end(self) -> None:
        """Wait until it has ended. By an event: in Python 3.11 a join that Ctrl-C interrupts takes
        the thread for ended, and the next join returns at once. Second by second: a Ctrl-C in the
        moment before a wait does not interrupt it."""
        has_ended = False
        while not has_ended:
            has_ended = self._ended.wait(_LOOK_S)

    def _close(self) -> None:
        """Cancel it and let it close; a second interrupt waits for that no longer than `END_S`."""
        try:
            if self._loop is not None and self._task is not None:
                with contextlib.suppress(RuntimeError):  # it has just ended
                    self._loop.call_soon_threadsafe(self._task.cancel)
            self._await_end()
            self._thread.join()
        except BaseException:
            end_at = clock.monotonic() + END_S
            _call_endings(end_at)
            self._ended.wait(max(0.0, end_at - clock.monotonic()))
            raise

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
