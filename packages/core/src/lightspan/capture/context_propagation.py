"""Carry the scope into threads, executors and pools (inside runners only).

`threading.Thread`, `ThreadPoolExecutor` and multiprocessing's `ThreadPool` start work in an empty
context before Python 3.14, so a model call in a raw thread would lose its agent. Runners call
`carry`; outside a scope nothing changes. A worker that is fed by a queue keeps the scope that began
it (`strays`); in other processes nothing is recorded or redirected.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial, wraps
from multiprocessing.pool import ThreadPool
from typing import Any, Final

from lightspan.capture import sdk_instrumentation
from lightspan.capture._globals import state
from lightspan.capture.context import current_context
from lightspan.capture.patch import Patch

_POOLS: Final = ("concurrent.futures.thread", "multiprocessing.pool")
"""Modules whose threads outlive the attempt that happened to start them."""
_POOL_METHODS: Final = ("apply_async", "_map_async", "imap", "imap_unordered")
"""All others of a `ThreadPool` go through these."""


def carry() -> bool:
    """Make threads started inside a scope inherit it. Idempotent: False if they did already."""
    if state.starters:
        return False
    changes: list[tuple[Any, str, Any]] = [
        (ThreadPoolExecutor, "submit", _submit),
        (threading.Thread, "start", _start),
        *((ThreadPool, name, _pooled) for name in _POOL_METHODS),
    ]
    state.starters += [
        Patch(owner, name, partial(make, getattr(owner, name))) for owner, name, make in changes
    ]
    if not state.forks_seen:
        state.forks_seen = True
        os.register_at_fork(after_in_child=_leave_child)
    return True


def stop_carrying() -> None:
    """Undo `carry`."""
    while state.starters:
        state.starters.pop().undo()


def _leave_child() -> None:
    """In a forked process: do there what is done in one that is spawned, nothing.

    It has the scope of whoever forked it, though it may work for all, as a pool's do; and our
    connections, which it would share with its parent.
    """
    if state.starters:
        state.lock = threading.Lock()  # another thread may have held it
        stop_carrying()
        sdk_instrumentation.uninstall()
        state.clients.clear()
        state.async_clients.clear()


def _submit(original: Callable[..., Future[Any]], patch: Patch) -> Callable[..., Future[Any]]:
    @wraps(original)
    def submit(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if not patch.on or current_context() is None:
            return original(self, fn, *args, **kwargs)
        return original(self, partial(copy_context().run, fn), *args, **kwargs)

    return submit


def _pooled(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    @wraps(original)
    def method(self: ThreadPool, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not patch.on or current_context() is None:
            return original(self, func, *args, **kwargs)
        context = copy_context()

        def carried(*each: Any, **named: Any) -> Any:
            return context.copy().run(func, *each, **named)  # one can be entered once at a time

        return original(self, carried, *args, **kwargs)

    return method


def _start(original: Callable[[threading.Thread], None], patch: Patch) -> Callable[..., None]:
    @wraps(original)
    def start(self: threading.Thread) -> None:
        # A pool's worker outlives the attempt that happened to start it: it must not inherit.
        worker = getattr(self, "_target", None)
        is_worker = getattr(worker, "__module__", "") in _POOLS
        if patch.on and current_context() is not None and not is_worker:
            self.run = partial(copy_context().run, self.run)  # type: ignore[method-assign]
        original(self)

    return start
