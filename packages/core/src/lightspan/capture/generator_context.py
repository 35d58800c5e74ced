"""Restriction of a block in a generator's body to the generator's own steps.

A generator's body runs in the context of the code that takes its next item, and Python has no hook
where the body is left or entered again. A ContextVar set in it stays set when it yields, and is not
set when the next item is taken in another context: a server may take each item in another thread.
So a block in a generator is stored with the generator's stack frame, and it applies while that
frame is on the stack. It is also set in the ContextVar (`GeneratorEntry`), for tasks and threads
that begin in a step; readers of the ContextVar first check whether the step was left.
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
from typing import Final, NamedTuple

from lightspan.capture.context_types import AgentContext


class GeneratorSteps:
    """The blocks that are open in one generator."""

    def __init__(self) -> None:
        self.blocks: list[AgentContext] = []
        """Acting agent of each block, the innermost last; empty once all blocks have ended."""


class GeneratorEntry(NamedTuple):
    """The acting agent as set in a step of a generator."""

    agent: AgentContext | None
    steps: GeneratorSteps
    block: AgentContext
    """Innermost block of the generator when the entry was set."""
    flow: object
    """Task or thread that ran the step."""
    outer: Entry
    """Entry of the context before the step."""


Entry = AgentContext | GeneratorEntry | None
"""Value of `context`'s ContextVar: an agent, an agent set in a generator, or none."""


def inside(agent: AgentContext | None, steps: GeneratorSteps, before: Entry) -> GeneratorEntry:
    """Return the entry for an agent that acts from now on in the current step of a generator.

    Args:
        agent: the acting agent.
        steps: blocks of the innermost generator that is running.
        before: entry that applies now.
    """
    return GeneratorEntry(agent, steps, steps.blocks[-1], current_flow(), without(steps, before))


def without(steps: GeneratorSteps, entry: Entry) -> Entry:
    """Return `entry`, or the entry around it if it was set in a step of the generator `steps`."""
    while isinstance(entry, GeneratorEntry) and entry.steps is steps:
        entry = entry.outer
    return entry


def current_entries(entry: Entry, running: Sequence[GeneratorSteps]) -> Entry:
    """Return `entry`, or the next one around it that was not set in a step that was left.

    Args:
        entry: value of the ContextVar.
        running: result of `running`.
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
    """Return whether `entry` was set in the innermost block of the generator `steps`."""
    return (
        isinstance(entry, GeneratorEntry)
        and entry.steps is steps
        and entry.block is steps.blocks[-1]
    )


def current_flow() -> object:
    """Return the current task, or the current thread outside tasks."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no loop runs
        return threading.current_thread()


# --- the stack ------------------------------------------------------------------------------
_HANDLE_RUN: Final = events.Handle._run.__code__
"""Code that runs a callback of an event loop, whose context does not come from its caller."""
_GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_ENTER_METHODS: Final = ("__enter__", "__aenter__")


def running(generators: Mapping[FrameType, GeneratorSteps]) -> Sequence[GeneratorSteps]:
    """Return the blocks of the generators on the current stack, the innermost generator first.

    Args:
        generators: stack frame → blocks, of all generators with open blocks.
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
    """Return the generator in whose body a block is entered; None outside generators.

    If a context manager enters the block in its own body (`@contextmanager`, `__enter__`), the
    result is for the code whose `with` statement enters the context manager.

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
