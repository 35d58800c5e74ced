"""Descriptions of stack locations."""

from __future__ import annotations

import sys
from types import FrameType, FunctionType

from lightspan.runners.stack_location import describe_stack, frame_stack


def _here() -> FrameType:
    return sys._getframe()


def test_a_frame_that_is_at_no_line() -> None:
    """A frame of another thread may be between two lines, which must not end the watchdog."""
    code = _here.__code__.replace(co_linetable=b"")
    frame = FunctionType(code, globals())()
    assert frame.f_lineno is None
    first = code.co_firstlineno
    expected = f"`def _here() -> FrameType:` at test_stack_location.py:{first} in _here"
    assert describe_stack(frame_stack(frame)) == expected
