"""Where a program is, in words: "`time.sleep(60)` at my_app.py:12 in answer".

Of a stack, people want the line of their own app, not the library's that it called.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import lightspan
from lightspan.schema.redaction import bounded_text

_MAX_LINE_LENGTH: Final = 100
_OURS: Final = f"{Path(lightspan.__file__).parent}{os.sep}"
_INSTALLED: Final = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python3\.\d+/")
"""Files of the standard library and of packages."""
_WAITING: Final = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""Where coroutines and generators keep their frame, and what they wait for."""


class StackLocation(NamedTuple):
    """A line of a program that is being executed."""

    file: str
    line: int
    function: str


def in_words(places: Sequence[StackLocation]) -> str:
    """Where it is.

    Args:
        places: of one stack, the innermost first.
    """
    if not places:
        return "a place that is not known"
    mine = next((place for place in places if _is_app(place)), None)
    place = mine or next((place for place in places if not place.file.startswith(_OURS)), places[0])
    source = linecache.getline(place.file, place.line).strip()
    at = f"{os.path.basename(place.file)}:{place.line} in {place.function}"
    return bounded_text(f"`{source[:_MAX_LINE_LENGTH]}` at {at}" if source else at)


def of_frame(frame: FrameType | None) -> Iterator[StackLocation]:
    """The places of a frame and of its callers."""
    while frame is not None:
        code = frame.f_code
        # between two lines a frame may be at none
        line = frame.f_lineno or code.co_firstlineno
        yield StackLocation(code.co_filename, line, code.co_name)
        frame = frame.f_back


def of_coroutine(coroutine: Any) -> list[StackLocation]:
    """The places where a coroutine waits and where those do that it waits for, innermost first."""
    places: list[StackLocation] = []
    while coroutine is not None:
        names = next((each for each in _WAITING if hasattr(coroutine, each[0])), None)
        frame = None if names is None else getattr(coroutine, names[0])
        if names is None or frame is None:  # a future, or it has ended
            break
        places.append(next(of_frame(frame)))
        coroutine = getattr(coroutine, names[1])
    return places[::-1]


def _is_app(place: StackLocation) -> bool:
    return not place.file.startswith(_OURS) and _INSTALLED.search(place.file) is None
