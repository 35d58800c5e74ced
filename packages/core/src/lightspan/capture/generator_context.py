"""Blocks in the bodies of generators: they hold for the generator's own steps, and nowhere else.

A generator's body runs in the context of whoever takes its next item, and Python has no hook where
it is left or entered again. What it sets in a ContextVar stays there when it yields, and is not
there when the next item is taken in another context: a server may take each in another thread. So a
block in a generator is kept with the generator's frame, and is in force where that frame is
running: where it is found on the stack. It is in the ContextVar too (`GeneratorEntry`), for the
tasks and threads that begin in a step; whoever reads that looks first whether it has been left.
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
        """Who acts in each of them, the innermost last; empty when all are over."""


class GeneratorEntry(NamedTuple):
    """Who acts, as it was set in a step of a generator."""

    acting: AgentContext | None
    steps: GeneratorSteps
    block: AgentContext
    """The innermost one at that time."""
    flow: object
    """The task or the thread of that step."""
    outer: Set
    """What this context had before."""


Set = AgentContext | GeneratorEntry | None
"""What the ContextVar holds."""


def inside(acting: AgentContext | None, steps: GeneratorSteps, before: Set) -> GeneratorEntry:
    """Who acts from now on in this step.

    Args:
        acting: who it is.
        steps: of the innermost generator that is running.
        before: what is in force.
    """
    return GeneratorEntry(acting, steps, steps.blocks[-1], current_flow(), without(steps, before))


def without(steps: GeneratorSteps, found: Set) -> Set:
    """What a context held before the step."""
    while isinstance(found, GeneratorEntry) and found.steps is steps:
        found = found.outer
    return found


def current_entries(found: Set, running: Sequence[GeneratorSteps]) -> Set:
    """What a context holds, without the steps that were left.

    Args:
        found: in its ContextVar.
        running: see `running`.
    """
    while isinstance(found, GeneratorEntry) and _is_left(found, running):
        found = found.outer
    return found


def _is_left(found: GeneratorEntry, running: Sequence[GeneratorSteps]) -> bool:
    if not found.steps.blocks:
        return True
    # Another task or thread began in the step, and may go on when the generator has yielded.
    return found.steps not in running and found.flow is current_flow()


def is_of(found: Set, steps: GeneratorSteps) -> bool:
    """Whether it was set in this generator's innermost block."""
    return (
        isinstance(found, GeneratorEntry)
        and found.steps is steps
        and found.block is steps.blocks[-1]
    )


def current_flow() -> object:
    """The task or the thread that runs."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no loop runs
        return threading.current_thread()


# --- the stack ------------------------------------------------------------------------------
_TURN_OF_A_LOOP: Final = events.Handle._run.__code__
"""What runs in it has a context of its own, whoever runs the loop."""
_GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_ENTERS: Final = ("__enter__", "__aenter__")


def running(known: Mapping[FrameType, GeneratorSteps]) -> Sequence[GeneratorSteps]:
    """Of the generators with open blocks whose step is running here, the innermost first.

    Args:
        known: the generators with open blocks.
    """
    found: list[GeneratorSteps] = []
    frame = sys._getframe(1) if known else None
    while frame is not None and frame.f_code is not _TURN_OF_A_LOOP:
        steps = known.get(frame)
        if steps is not None:
            found.append(steps)
        frame = frame.f_back
    return found


def generator_of(frame: FrameType) -> FrameType | None:
    """The generator in whose body a block is entered; None where that is no generator's.

    A context manager that is made of a generator enters it for the block that it stands around.

    Args:
        frame: that enters it.
    """
    while True:
        code, caller = frame.f_code, frame.f_back
        if caller is None:
            return None
        if not (_enters(code) or (code.co_flags & _GENERATOR and _enters(caller.f_code))):
            return frame if code.co_flags & _GENERATOR else None
        frame = caller


def _enters(code: CodeType) -> bool:
    return code.co_filename == contextlib.__file__ or code.co_name in _ENTERS
