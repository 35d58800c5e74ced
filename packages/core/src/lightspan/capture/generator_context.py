"""Restrict a `with` block in a generator's body to the generator's own steps.

A generator's body runs in the context of the code that takes its next item. Python has no hook
where the body is left or entered again. So a ContextVar that is set in the body stays set when the
generator yields. It is not set when the next item is taken in another context: a server may take
each item in another thread.

Therefore a block in a generator is stored with the generator's stack frame, and it applies while
that frame is on the stack. It is also set in the ContextVar (`GeneratorEntry`), for tasks and
threads that begin in a step. Readers of the ContextVar first check whether the step was left.
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
    """The open `with` blocks of one generator that set an acting agent."""

    def __init__(self) -> None:
        self.blocks: list[AgentContext] = []
        """Acting agent of each block, the innermost last; empty once all blocks have ended."""


class GeneratorEntry(NamedTuple):
    """Value of the ContextVar after a generator has set the acting agent.

    It holds only until the generator yields.
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
    """Return the value of the ContextVar while `agent` acts in the generator that is running.

    Args:
        agent: the acting agent; None for no agent.
        steps: open blocks of the generator.
        before: current value of the ContextVar.
    """
    return GeneratorEntry(agent, steps, steps.blocks[-1], current_flow(), without(steps, before))


def without(steps: GeneratorSteps, entry: Entry) -> Entry:
    """Return the value that the ContextVar had before the generator `steps` set it to `entry`.

    Return `entry` itself if this generator did not set it.
    """
    while isinstance(entry, GeneratorEntry) and entry.steps is steps:
        entry = entry.outer
    return entry


def current_entries(entry: Entry, running: Sequence[GeneratorSteps]) -> Entry:
    """Return the value that the ContextVar should have now.

    A value that a generator has set ends when the generator yields. Then the value before it
    applies again.

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
    """Return whether `entry` was set in the innermost open block of the generator `steps`."""
    return (
        isinstance(entry, GeneratorEntry)
        and entry.steps is steps
        and entry.block is steps.blocks[-1]
    )


def current_flow() -> object:
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
    """Return the stack frame of the generator whose body has the `with` block.

    Return None if the block is not in a generator. The body of a context manager
    (`@contextmanager`, `__enter__`) does not count: the result is for the code that uses the
    context manager.

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
