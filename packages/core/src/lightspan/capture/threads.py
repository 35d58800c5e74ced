"""Carry the scope into threads and executors (inside runners only).

`threading.Thread` and `ThreadPoolExecutor` start work in an empty context before Python 3.14, so a
model call in a raw thread would lose its agent. Runners call `carry`; outside a scope nothing
changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial, wraps
from typing import Any

from lightspan.capture.patch import Patch
from lightspan.capture.scope import pushed
from lightspan.capture.state import state


def carry() -> None:
    """Make threads started inside a scope inherit it. Idempotent."""
    if not state.starters:
        state.starters += [
            Patch(ThreadPoolExecutor, "submit", partial(_submit, ThreadPoolExecutor.submit)),
            Patch(threading.Thread, "start", partial(_start, threading.Thread.start)),
        ]


def stop_carrying() -> None:
    """Undo `carry`."""
    while state.starters:
        state.starters.pop().undo()


def _submit(original: Callable[..., Future[Any]], patch: Patch) -> Callable[..., Future[Any]]:
    @wraps(original)
    def submit(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if not patch.on or pushed() is None:
            return original(self, fn, *args, **kwargs)
        return original(self, partial(copy_context().run, fn), *args, **kwargs)

    return submit


def _start(original: Callable[[threading.Thread], None], patch: Patch) -> Callable[..., None]:
    @wraps(original)
    def start(self: threading.Thread) -> None:
        # A pool's worker outlives the attempt that happened to start it: it must not inherit.
        worker = getattr(self, "_target", None)
        is_worker = getattr(worker, "__module__", "") == "concurrent.futures.thread"
        if patch.on and pushed() is not None and not is_worker:
            self.run = partial(copy_context().run, self.run)  # type: ignore[method-assign]
        original(self)

    return start
