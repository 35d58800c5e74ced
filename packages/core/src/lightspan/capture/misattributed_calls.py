"""Detect model calls that were made outside every open attempt, so an attempt may miss them.

A thread or task keeps the context in which it was started. If a worker serves several attempts, its
model calls are recorded for the first attempt, and are missing from the others. The attempt that a
misattributed call belongs to is unknown, so every open attempt that made no call gets a capture
error.
"""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any, Final

from lightspan.capture._globals import state
from lightspan.capture.context_types import AgentContext
from lightspan.capture.recorder import Recorder

ADVICE: Final = (
    "start such workers in each attempt, or queue a `contextvars.copy_context()` with each piece "
    "of work and run it there: `context.run(…)` in a thread, "
    "`asyncio.create_task(…, context=context)` in a task"
)

# Not in `context`'s ContextVar, because new threads and tasks must copy the value unchanged.
_home: Final[ContextVar[tuple[int, int] | None]] = ContextVar("lightspan_home", default=None)
"""Ids of the thread and of the task that opened the attempt. The id of None stands for no task."""


def mark_home() -> None:
    """Note that the current thread and task are those that open the attempt."""
    _home.set(_place())


def check_call(current: AgentContext | None) -> None:
    """Count a model call if it was made outside every open attempt, in a runner's process.

    Args:
        current: context of the call. It counts as outside if it is None, if it is no attempt's, or
            if its attempt has ended.
    """
    if "runner" not in state.carriers:
        return
    # The context of `lightspan.apply_prompts` is outside every attempt.
    owner = None if current is None or current.scope.is_outside else current
    if owner is not None and not owner.scope.recorder.is_over:
        return
    if owner is not None and _home.get() == _place():
        return  # the app continues after its own end: the call is no other attempt's
    attempt = "no attempt" if owner is None else "an attempt that is over"
    state.misattributed_reason = (
        "it made no model call that was captured, and meanwhile one was made outside every open "
        f"attempt, by {_worker()}, which belongs to {attempt}: {ADVICE}"
    )
    state.misattributed_count += 1


def count() -> int:
    """Return the number of model calls so far that `check_call` has counted."""
    return state.misattributed_count


def missing_call_reason(recorder: Recorder, before: int) -> str | None:
    """Return why a model call may be missing from an attempt; None if no call seems to be missing.

    Args:
        recorder: recorder of the attempt.
        before: value of `count()` when the attempt began.
    """
    is_suspect = state.misattributed_count > before and not recorder.has_called
    return state.misattributed_reason if is_suspect else None


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return None


def _place() -> tuple[int, int]:
    return threading.get_ident(), id(_task())


def _worker() -> str:
    task = _task()
    if task is None:
        return f"the thread {threading.current_thread().name!r}"
    name = getattr(task.get_coro(), "__qualname__", "")
    return f"the task {task.get_name()!r}{f' ({name})' if name else ''}"
