"""Restrict a `with` block in a generator's body to the generator's own steps.

A step runs from taking the generator's next item until the generator yields it. It runs in the
context of the code that takes the item, and Python has no hook for its begin and end. So a
ContextVar that the body sets stays set after the generator yields. If the next item is taken in
another context, for example in another thread, the ContextVar is not set there.

Therefore a block in a generator is stored with the generator's stack frame, and it applies while
that frame is on the stack. It is also set in the ContextVar (`GeneratorEntry`), for tasks and
threads that begin in a step. Code that reads the ContextVar first checks whether the step has
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
from asyncio import events
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from lightspan.capture.context_types import AgentContext


class GeneratorSteps:
    """The open `with` blocks of one generator that set an acting agent."""

    def __init__(self) -> None:
        self.blocks: list[AgentContext] = []
        """Acting agent of each block, the innermost last; empty once all blocks have ended."""


class GeneratorEntry(NamedTuple):
    """Value of the ContextVar after a generator has set the acting agent.

    It applies only until the generator yields.
    """

    agent: AgentContext | None
    steps: GeneratorSteps
    block: AgentContext
    """Innermost block of the generator when the entry was set."""
    flow: object
    """The task or thread that ran the step."""
    outer: Entry
    """The value of the ContextVar before the step."""


Entry = AgentContext | GeneratorEntry | None
"""A value of the ContextVar of `context`: an agent, an agent set in a generator, or None."""


def inside(agent: AgentContext | None, steps: GeneratorSteps, before: Entry) -> GeneratorEntry:
    """Return the value of the ContextVar for a generator that runs and has set the acting agent.

    Args:
        agent: the acting agent; None for no agent.
        steps: open blocks of the generator.
        before: current value of the ContextVar.
    """
    return GeneratorEntry(agent, steps, steps.blocks[-1], current_flow(), without(steps, before))


def without(steps: GeneratorSteps, entry: Entry) -> Entry:
    """Return the value of the ContextVar before a generator set it.

    Args:
        steps: open blocks of the generator.
        entry: current value of the ContextVar. It is returned if another generator, or none, set
            it.
    """
    while isinstance(entry, GeneratorEntry) and entry.steps is steps:
        entry = entry.outer
    return entry


def current_entries(entry: Entry, running: Sequence[GeneratorSteps]) -> Entry:
    """Return the value that the ContextVar should have now.

    If a generator has set a value and has yielded since, the value before it applies again.

    Args:
        entry: current value of the ContextVar.
        running: open blocks of the generators that are running, as `running` returns them.
    """
    while isinstance(entry, GeneratorEntry) and _was_left(entry, running):
        entry = entry.outer
    return entry


def _was_left(entry: GeneratorEntry, running: Sequence[GeneratorSteps]) -> bool:
    if not entry.steps.blocks:
        return True
    # A task or thread that began in the step may continue after the generator yields.
    return entry.steps not in running and entry.flow is current_flow()


def is_set_in(entry: Entry, steps: GeneratorSteps) -> bool:
    """Return whether `entry` was set in the innermost open block of the generator.

    Args:
        entry: value of the ContextVar.
        steps: open blocks of the generator.
    """
    return (
        isinstance(entry, GeneratorEntry)
        and entry.steps is steps
        and entry.block is steps.blocks[-1]
    )


def current_flow() -> asyncio.Task[Any] | threading.Thread:
    """Return the task that is running, or the thread if no task is running."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no loop runs
        return threading.current_thread()


# --- the stack ------------------------------------------------------------------------------
_HANDLE_RUN: Final = events.Handle._run.__code__
"""The code that runs a callback of an event loop. The callback's context does not come from its
caller."""
_GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_ENTER_METHODS: Final = ("__enter__", "__aenter__")


def running(generators: Mapping[FrameType, GeneratorSteps]) -> Sequence[GeneratorSteps]:
    """Return the open blocks of each generator that is running, the innermost generator first.

    Args:
        generators: stack frame → blocks, for all generators with open blocks.
    """
    on_stack: list[GeneratorSteps] = []
    frame = sys._getframe(1) if generators else None
    while frame is not None and frame.f_code is not _HANDLE_RUN:
        steps = generators.get(frame)
        if steps is not None:
            on_stack.append(steps)
        frame = frame.f_back
    return on_stack


def generator_of(frame: FrameType) -> FrameType | None:
    """Return the stack frame of the generator whose body has a `with` block.

    Return None if the block is not in a generator. If a context manager's own code
    (`@contextmanager`, `__enter__`) enters the block, the code that uses the context manager
    counts.

    Args:
        frame: stack frame that enters the block.
    """
    while True:
        code, caller = frame.f_code, frame.f_back
        if caller is None:
            return None
        if not (_enters(code) or (code.co_flags & _GENERATOR and _enters(caller.f_code))):
            return frame if code.co_flags & _GENERATOR else None
        frame = caller


def _enters(code: CodeType) -> bool:
    return code.co_filename == contextlib.__file__ or code.co_name in _ENTER_METHODS
