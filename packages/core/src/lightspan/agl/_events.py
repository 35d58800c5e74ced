"""Events that end what runs: of threads, and of processes."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.context import BaseContext
from typing import Protocol, runtime_checkable


@runtime_checkable
class ExecutionEvent(Protocol):
    """Something that is set once, and waited for."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool:
        """True if it is set; False if the time (seconds) was over before."""
        ...


class ThreadingEvent(threading.Event):
    """Of the threads of a process."""


class MultiprocessingEvent:
    """Of several processes; hand it to them when they are started.

    Args:
        ctx: how they are started.
    """

    def __init__(self, *, ctx: BaseContext | None = None) -> None:
        self._event = multiprocessing.Event() if ctx is None else ctx.Event()

    def set(self) -> None:
        """Set it."""
        self._event.set()

    def clear(self) -> None:
        """As if it had not been set."""
        self._event.clear()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """See `ExecutionEvent`."""
        return self._event.wait(timeout)
