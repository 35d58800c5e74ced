"""Copy the current context into threads, executors and pools, in runners only.

Before Python 3.14, `threading.Thread`, `ThreadPoolExecutor` and multiprocessing's `ThreadPool`
start work in an empty context, so a model call in a new thread would have no agent. Runners call
`carry`, so that the work starts in a copy of the current context. Threads that are started outside
an attempt are not changed. A worker thread that takes work from a queue keeps the context in which
it was started (`misattributed_calls`). In a child process of a runner nothing is recorded or
redirected.
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
"""Modules whose threads outlive the attempt in which they were started."""
_POOL_METHODS: Final = ("apply_async", "_map_async", "imap", "imap_unordered")
"""Methods of `ThreadPool` through which all its other methods submit work."""


def carry() -> bool:
    """Make threads that are started in an attempt belong to the attempt and its acting agent.

    Return False if `carry` was called before.
    """
    if state.thread_patches:
        return False
    changes: list[tuple[Any, str, Any]] = [
        (ThreadPoolExecutor, "submit", _submit),
        (threading.Thread, "start", _start),
        *((ThreadPool, name, _pool_method) for name in _POOL_METHODS),
    ]
    state.thread_patches += [
        Patch(owner, name, partial(make, getattr(owner, name))) for owner, name, make in changes
    ]
    if not state.has_fork_hook:
        state.has_fork_hook = True
        os.register_at_fork(after_in_child=_leave_child)
    return True


def stop_carrying() -> None:
    """Undo `carry`."""
    while state.thread_patches:
        state.thread_patches.pop().undo()


def _leave_child() -> None:
    """Undo `carry` and the wrapping of SDKs in a forked child process, so that nothing is recorded.

    The child starts in the context of the thread that forked it. But it may work for several
    attempts, as the processes of a pool do. It would also use the connections of its parent.
    """
    if state.thread_patches:
        state.lock = threading.Lock()  # a thread of the parent may have held it
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


def _pool_method(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    @wraps(original)
    def method(self: ThreadPool, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not patch.on or current_context() is None:
            return original(self, func, *args, **kwargs)
        context = copy_context()

        def run(*func_args: Any, **func_kwargs: Any) -> Any:
            # A copy, since a context cannot be entered by two threads at once.
            return context.copy().run(func, *func_args, **func_kwargs)

        return original(self, run, *args, **kwargs)

    return method


def _start(original: Callable[[threading.Thread], None], patch: Patch) -> Callable[..., None]:
    @wraps(original)
    def start(self: threading.Thread) -> None:
        # A pool's worker outlives the attempt in which it starts, so it must not inherit.
        is_worker = getattr(getattr(self, "_target", None), "__module__", "") in _POOLS
        if patch.on and current_context() is not None and not is_worker:
            self.run = partial(copy_context().run, self.run)  # type: ignore[method-assign]
        original(self)

    return start
