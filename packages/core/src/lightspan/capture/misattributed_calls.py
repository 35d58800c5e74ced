"""Detect model calls that a worker of the app's own makes for an attempt that is over, or for none.

A thread or task acts for the attempt that began it, for its whole life: one that serves several
attempts calls the model in the name of the first. Such a call is missing from one of the attempts
under way, so each of those that made no call is damaged.
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
    "begin such workers in each attempt, or put a `contextvars.copy_context()` beside the work and "
    "do it there: `context.run(…)` in a thread, `asyncio.create_task(…, context=context)` in a task"
)

# Not in `scope`'s ContextVar: this one is copied to threads and tasks whoever acts there.
_home: Final[ContextVar[tuple[int, int] | None]] = ContextVar("lightspan_home", default=None)
"""The thread and the task in which the scope was opened."""


def enter_home() -> None:
    """Mark this thread and task as the one that opened the current scope."""
    _home.set(_place())


def look(current: AgentContext | None) -> None:
    """Count a model call that begins if it is made for no attempt under way."""
    if not state.starters:
        return
    # who acts outside of every attempt, by `lightspan.apply_prompts`, acts for none
    owner = None if current is None or current.scope.is_outside else current
    if owner is not None and not owner.scope.recorder.is_over:
        return
    if owner is not None and _home.get() == _place():
        return  # an app that goes on past its own end: no other attempt's work
    whose = "none" if owner is None else "one that is over"
    state.stray = (
        "it made no model call that was seen, and one was made beside it for no attempt under way, "
        f"by {_worker()}, which belongs to {whose}: {ADVICE}"
    )
    state.strays += 1


def count() -> int:
    """Return how many calls were made for no attempt under way."""
    return state.strays


def missing_from(recorder: Recorder, before: int) -> str | None:
    """Return why a call may be missing from an attempt; None if nothing says so.

    Args:
        recorder: of the attempt.
        before: how many such calls there were when it began.
    """
    return state.stray if state.strays > before and not recorder.has_called else None


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
