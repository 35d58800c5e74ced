"""Strays: model calls that a worker of the app's own makes for another attempt than it acts for.

A thread or a task acts for whoever began it, for ever: one that the first attempt began, and that
every attempt feeds by a queue, asks for all of them in the first one's name. Whom it works for
nobody can tell in general. What can be told, and damages the attempts concerned:

- who put what the worker took last into a `queue.Queue` or an `asyncio.Queue`;
- that the attempt for which it acts is over, or that there is none. Then the call is missing from
  one of those under way: from any that has made no call.
"""

from __future__ import annotations

import asyncio
import queue as queues
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from lightspan.capture.recorder import Recorder
from lightspan.capture.stack import Acting
from lightspan.capture.state import state

_GIVEN: Final = "_lightspan_given"
_MOST_GIVEN: Final = 10_000
"""A queue that hands out other objects than were put there would have us keep those."""
_MOST_TAKEN: Final = 8
_POOLS: Final = (queues.LifoQueue, asyncio.LifoQueue)
"""No orders wait in these: what was given back last is taken first, as in a pool of connections."""
ADVICE: Final = (
    "begin such workers in each attempt, or put a `contextvars.copy_context()` beside the work and "
    "do it there: `context.run(…)` in a thread, `asyncio.create_task(…, context=context)` in a task"
)

# Beside `scope`'s ContextVar and not in it: these hold where nobody acts, too, in the worker that
# takes what an attempt put into a queue.
_giver: Final[ContextVar[Acting | None]] = ContextVar("lightspan_giver", default=None)
"""Who put what was last taken here, or had it put."""
_Handle = weakref.ref[Any] | int
_taken: Final[ContextVar[tuple[tuple[_Handle, _Handle], ...]]] = ContextVar(
    "lightspan_taken", default=()
)
"""The queues and the items that were taken here last: what is put back into the same queue is no
order, but a connection of a pool, say, or the permission of a limiter."""
_home: Final[ContextVar[tuple[int, int] | None]] = ContextVar("lightspan_home", default=None)
"""The thread and the task in which the scope was opened: what these take is no order."""


# --- queues -----------------------------------------------------------------------------------
def give(queue: Any, item: Any, acting: Acting | None) -> Callable[[], None] | None:
    """Note for whom this is put into the queue; returns what undoes it.

    Args:
        queue: an object that nobody else has notes on.
        item: what is put there.
        acting: who puts it; a worker does so for whom it works.
    """
    if isinstance(queue, _POOLS):
        return None
    taken = _taken.get()
    others = tuple(one for one in taken if not (_is(one[0], queue) and _is(one[1], item)))
    if len(others) < len(taken):
        _taken.set(others)
        _giver.set(None)
        return None
    for_whom = acting if _home.get() == _place() else (_giver.get() or acting)
    if for_whom is None:
        return None
    given = vars(queue).setdefault(_GIVEN, {})
    if len(given) > _MOST_GIVEN:
        given.clear()
    note = (item, for_whom)
    given.setdefault(id(item), deque(maxlen=_MOST_GIVEN)).append(note)
    return lambda: _forget(given, id(item), note)


def take(queue: Any, item: Any) -> None:
    """Note for whom works who has taken this out of the queue."""
    if isinstance(queue, _POOLS):
        return
    _taken.set(((_handle(queue), _handle(item)), *_taken.get()[: _MOST_TAKEN - 1]))
    given = vars(queue).get(_GIVEN)
    if given is None:
        return
    notes = given.get(id(item))
    try:
        note = notes.popleft() if notes else None
    except IndexError:  # another thread was faster
        note = None
    if not notes:
        given.pop(id(item), None)
    _giver.set(None if note is None else note[1])


def _handle(thing: Any) -> _Handle:
    """Stands for the thing and does not keep it alive: a worker's context lives long. What cannot
    be referred to weakly may be another thing by then; an order then goes unnoticed."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return id(thing)


def _is(handle: _Handle, thing: Any) -> bool:
    return handle == id(thing) if isinstance(handle, int) else handle() is thing


def _forget(given: Mapping[int, deque[Any]], key: int, note: Any) -> None:
    notes = given.get(key, deque())
    for place, each in enumerate(notes):
        if each is note:
            del notes[place]
            return


# --- calls ------------------------------------------------------------------------------------
def is_here() -> None:
    """The scope that is open in this context was opened by this thread and task."""
    _home.set(_place())
    _giver.set(None)
    _taken.set(())


def look(current: Acting | None) -> None:
    """A model call begins for whoever acts: see whether it is another's."""
    giver = _giver.get()
    if giver is not None and _home.get() != _place() and not _same(giver, current):
        reason = (
            f"a model call was made for an attempt by {_worker()}, which does not belong to it: "
            f"{ADVICE}"
        )
        for each in (giver, current):
            if each is not None:
                each.scope.recorder.damage(reason)
        return
    # who acts outside of every attempt, by `lightspan.use`, acts for none
    owner = None if current is None or current.scope.is_outside else current
    if state.starters and (owner is None or owner.scope.recorder.is_over):
        if owner is not None and _home.get() == _place():
            return  # an app that goes on past its own end: nobody else's work
        whose = "none" if owner is None else "one that is over"
        state.stray = (
            "it made no model call that was seen, and one was made beside it for no attempt under "
            f"way, by {_worker()}, which belongs to {whose}: {ADVICE}"
        )
        state.strays += 1


def _same(one: Acting, other: Acting | None) -> bool:
    return other is not None and one.scope.attempt_id == other.scope.attempt_id


def count() -> int:
    """Calls for no attempt under way, so far."""
    return state.strays


def missing_from(recorder: Recorder, before: int) -> str | None:
    """Why a call may be missing from an attempt; None: nothing says so.

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
