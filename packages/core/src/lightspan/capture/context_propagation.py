"""Let the work of threads, executors and pools belong to the attempt that starts it.

Before Python 3.14, `threading.Thread`, `ThreadPoolExecutor` and multiprocessing's `ThreadPool`
start work in an empty context, so a model call in a new thread would have no agent. Runners,
recordings, `connect` and `apply_prompts` call `carry`. In a runner, the work then starts in a copy
of the current context. In production, work that is submitted to a pool gets the acting agent only,
also one that a resolver finds: other context variables of the app stay as they are, and so do its
threads, many of which outlive a request. Work that begins outside an attempt and every agent is not
changed. A worker thread that takes work from a queue keeps the context in which it was started
(`misattributed_calls`). In a child process of a runner nothing is recorded or redirected.

An item of a generator can be taken in a new context, which lacks the generator's agent
(`generator_context`). So the agent is set there before a task or an event loop copies the context.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import partial, wraps
from multiprocessing.pool import ThreadPool
from typing import Any, Final

from lightspan.capture import sdk_instrumentation
from lightspan.capture._globals import state
from lightspan.capture.context import current_context, lacks_agent, resolve_agent, set_agent
from lightspan.capture.context_types import AgentContext
from lightspan.capture.patch import Patch

_POOLS: Final = ("concurrent.futures.thread", "multiprocessing.pool")
"""Modules whose threads outlive the attempt in which they were started."""
_POOL_METHODS: Final = ("apply_async", "_map_async", "imap", "imap_unordered")
"""Methods of `ThreadPool` through which all its other methods submit work."""
_LOOP_METHODS: Final = ("create_task", "call_soon_threadsafe")
"""Methods of an event loop that copy the current context; others call `create_task`."""

RUNNER: Final = "runner"
RECORDING: Final = "recording"
PROMPTS: Final = "prompts"
CONNECTION: Final = "connection"


def carry(owner: str = RUNNER) -> bool:
    """Make work that is started in an attempt belong to the attempt and its acting agent.

    Args:
        owner: `RUNNER`; or `RECORDING`, `PROMPTS` or `CONNECTION` for an app in production.

    Returns:
        False if `carry` was called for `owner` before.
    """
    if owner in state.carriers:
        return False
    state.carriers.add(owner)
    if not state.thread_patches:
        changes: list[tuple[Any, str, Any]] = [
            (ThreadPoolExecutor, "submit", _submit),
            (threading.Thread, "start", _start),
            *((ThreadPool, name, _submit) for name in _POOL_METHODS),
            (asyncio.Runner, "__init__", _enter_step),  # `run` is called in a copy of the context
            *((asyncio.BaseEventLoop, name, _enter_step) for name in _LOOP_METHODS),
        ]
        state.thread_patches += [
            Patch(owner, name, partial(make, getattr(owner, name))) for owner, name, make in changes
        ]
    if not state.has_fork_hook:
        state.has_fork_hook = True
        os.register_at_fork(after_in_child=_leave_child)
    return True


def stop_carrying(owner: str = RUNNER) -> None:
    """Undo `carry` for `owner`."""
    state.carriers.discard(owner)
    while state.thread_patches and not state.carriers:
        state.thread_patches.pop().undo()


def _leave_child() -> None:
    """Undo `carry` and the wrapping of SDKs in a forked child process, so that nothing is recorded.

    The child starts in the context of the thread that forked it. But it may work for several
    attempts, as the processes of a pool do. It would also use the connections of its parent.
    """
    if RUNNER in state.carriers:
        state.lock = threading.Lock()  # a thread of the parent may have held it
        stop_carrying()
        sdk_instrumentation.uninstall()
        state.clients.clear()
        state.async_clients.clear()


def _copied(patch: Patch) -> Callable[..., Any] | None:
    """Return a function that calls a function in the current attempt, in any thread.

    None if no attempt is current.
    """
    current = current_context() if patch.on else None
    if current is None:
        return None
    if not current.scope.is_rollout:
        acting = resolve_agent(current)
        return None if acting.scope.is_outside and not acting.frames else partial(_run, acting)
    context = copy_context()
    # A copy, since a context cannot be entered by two threads at once.
    return lambda func, *args, **kwargs: context.copy().run(func, *args, **kwargs)


def _run(agent: AgentContext | None, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    leave = set_agent(agent)
    try:
        return func(*args, **kwargs)
    finally:
        leave()


def _carried(run: Callable[..., Any] | None, func: Any) -> Any:
    """Return a function of the app, for a pool or a thread, so that it runs in the current attempt.

    Args:
        run: calls a function in the current attempt; None to leave `func` unchanged.
        func: the function. It may be the `run` of a context that the app has copied, or a partial
            of it. If that context lacks the current agent (`lacks_agent`), it gets it.
    """
    method, args = (func.func, func.args) if isinstance(func, partial) else (func, ())
    inside = getattr(method, "__self__", None)
    if not isinstance(inside, Context) or not lacks_agent(inside):
        return func if run is None else partial(run, func)
    return partial(method, partial(_run, current_context()), *args, **getattr(func, "keywords", {}))


def _enter_step(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    own = state  # the interpreter's end clears the modules' variables

    @wraps(original)
    def copying(*args: Any, **kwargs: Any) -> Any:
        if own.steps and patch.on:
            current_context()  # sets the agent of a generator that runs
        return original(*args, **kwargs)

    return copying


def _submit(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    @wraps(original)
    def submit(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = _copied(patch)
        if run is not None and args:
            args = (_carried(run, args[0]), *args[1:])
        elif run is not None and "func" in kwargs:  # a parameter of `ThreadPool`'s methods
            kwargs["func"] = _carried(run, kwargs["func"])
        return original(self, *args, **kwargs)

    return submit


def _start(original: Callable[[threading.Thread], None], patch: Patch) -> Callable[..., None]:
    @wraps(original)
    def start(self: threading.Thread) -> None:
        current = current_context() if patch.on else None
        target = getattr(self, "_target", None)
        # A pool's worker outlives the attempt in which it starts, so it must not inherit.
        if current is not None and getattr(target, "__module__", "") not in _POOLS:
            self._target = _carried(None, target)  # type: ignore[attr-defined]
            if current.scope.is_rollout:
                self.run = partial(copy_context().run, self.run)  # type: ignore[method-assign]
        original(self)

    return start
