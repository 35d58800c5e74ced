"""What a program is, what it may ask of any module, and a span to do it with."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

Program = Callable[[Any], Any]
PROGRAMS: dict[str, Program] = {}
SHOWN: dict[str, set[str]] = {}
"""Program → the names that it shows."""


def shows(*names: str) -> Callable[[Program], Program]:
    def keep(program: Program) -> Program:
        PROGRAMS[program.__name__] = program
        SHOWN[program.__name__] = set(names)
        return program

    return keep


def raised(call: Callable[[], Any]) -> str:
    """Which of Python's errors it raises."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        kinds = (TypeError, ValueError, RuntimeError)
        return next(kind.__name__ for kind in kinds if isinstance(error, kind))
    return "nothing"


def fails(call: Callable[[], Any]) -> bool:
    """Whether it raises anything."""
    try:
        call()
    except Exception:
        return True
    return False


def decorator_of(agl: Any) -> Any:
    """0.3.0 hides the decorator `reward` behind a module of that name."""
    return agl.reward.reward if isinstance(agl.reward, types.ModuleType) else agl.reward


IDS = {"trace_id": "a" * 32, "span_id": "b" * 16, "parent_id": "c" * 16}


def span(agl: Any, **fields: Any) -> Any:
    return agl.Span.from_attributes(**{"attributes": {}, **IDS, **fields})
