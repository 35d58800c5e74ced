"""Describe stack locations as text, such as "`time.sleep(60)` at my_app.py:12 in answer".

The text names the line of the app, not the line of a library that the app called.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any, Final

import lightspan
from lightspan.schema.redaction import bounded_text

_MAX_LINE_LENGTH: Final = 100
_LIGHTSPAN: Final = f"{Path(lightspan.__file__).parent}{os.sep}"
_INSTALLED: Final = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python3\.\d+/")
"""Matches files of the standard library and of installed packages."""
_AWAITED: Final = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""Names of attributes of coroutines and generators: the frame, and the awaited object."""


def describe_stack(stack: Sequence[FrameSummary]) -> str:
    """Return the app's innermost line in `stack` as text, with its position.

    Args:
        stack: locations of a stack, innermost first; empty if unknown.
    """
    if not stack:
        return "an unknown location"
    outside = [place for place in stack if not place.filename.startswith(_LIGHTSPAN)] or stack[:1]
    place = next((p for p in outside if _INSTALLED.search(p.filename) is None), outside[0])
    source = place.line or ""
    at = f"{os.path.basename(place.filename)}:{place.lineno or '?'} in {place.name}"
    return bounded_text(f"`{source[:_MAX_LINE_LENGTH]}` at {at}" if source else at)


def frame_stack(frame: FrameType | None) -> list[FrameSummary]:
    """Return the locations of `frame` and of its callers, innermost first; empty for None."""
    if frame is None:
        return []
    return StackSummary.extract(traceback.walk_stack(frame))


def error_stack(error: BaseException) -> list[FrameSummary]:
    """Return the locations through which an exception was raised, innermost first."""
    return list(StackSummary.extract(traceback.walk_tb(error.__traceback__)))[::-1]


def coroutine_stack(coroutine: Any) -> list[FrameSummary]:
    """Return the lines at which a coroutine and the coroutines that it awaits are waiting.

    The innermost location is first. Empty if the coroutine has ended.
    """
    stack: list[FrameSummary] = []
    while coroutine is not None:
        frame_name, awaited_name = next(
            (names for names in _AWAITED if hasattr(coroutine, names[0])), ("", "")
        )
        frame = getattr(coroutine, frame_name, None)
        if frame is None:  # a future, or a coroutine that has ended
            break
        code = frame.f_code
        stack.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        coroutine = getattr(coroutine, awaited_name)
    return stack[::-1]
