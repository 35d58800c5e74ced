"""Describe stack locations as text, such as "`time.sleep(60)` at my_app.py:12 in answer".

The text names the line of the app, not the line of a library that the app called.
"""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import lightspan
from lightspan.schema.redaction import bounded_text

_MAX_LINE_LENGTH: Final = 100
_LIGHTSPAN: Final = f"{Path(lightspan.__file__).parent}{os.sep}"
_INSTALLED: Final = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python3\.\d+/")
"""Matches files of the standard library and of installed packages."""
_AWAITED: Final = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""Names of attributes of coroutines and generators: the frame, and the awaited object."""


class StackLocation(NamedTuple):
    """A line of code that is being executed."""

    file: str
    line: int
    function: str


def describe_stack(stack: Sequence[StackLocation]) -> str:
    """Return the app's innermost line in `stack` as text, with its position.

    Args:
        stack: locations of a stack, innermost first; empty if unknown.
    """
    if not stack:
        return "an unknown location"
    outside = [place for place in stack if not place.file.startswith(_LIGHTSPAN)] or stack[:1]
    place = next((place for place in outside if _INSTALLED.search(place.file) is None), outside[0])
    source = linecache.getline(place.file, place.line).strip()
    at = f"{os.path.basename(place.file)}:{place.line} in {place.function}"
    return bounded_text(f"`{source[:_MAX_LINE_LENGTH]}` at {at}" if source else at)


def frame_stack(frame: FrameType | None) -> list[StackLocation]:
    """Return the locations of `frame` and of its callers, innermost first; empty for None."""
    if frame is None:
        return []
    return [_location(each, line) for each, line in traceback.walk_stack(frame)]


def error_stack(error: BaseException) -> list[StackLocation]:
    """Return the locations through which an exception was raised, innermost first."""
    walked = traceback.walk_tb(error.__traceback__)
    return [_location(frame, line) for frame, line in walked][::-1]


def coroutine_stack(coroutine: Any) -> list[StackLocation]:
    """Return the lines at which a coroutine and the coroutines that it awaits are waiting.

    The innermost location is first. Empty if the coroutine has ended.
    """
    stack: list[StackLocation] = []
    while coroutine is not None:
        frame_name, awaited_name = next(
            (names for names in _AWAITED if hasattr(coroutine, names[0])), ("", "")
        )
        frame = getattr(coroutine, frame_name, None)
        if frame is None:  # a future, or a coroutine that has ended
            break
        stack.append(_location(frame, frame.f_lineno))
        coroutine = getattr(coroutine, awaited_name)
    return stack[::-1]


def _location(frame: FrameType, line: int | None) -> StackLocation:
    code = frame.f_code  # a frame between two lines has no line number
    return StackLocation(code.co_filename, line or code.co_firstlineno, code.co_name)
