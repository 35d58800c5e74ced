"""Tool calls in generated text, in Hermes' format: `<tool_call>{"name": …}</tool_call>`.

A call whose JSON is malformed stays text, exactly as the model wrote it: the app sees the model's
real error and nothing is repaired.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_CALL: Final = re.compile(rf"{OPEN}\s*(.*?)\s*{CLOSE}", re.DOTALL)
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any: Final = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call; `arguments` is the JSON text as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A generated text: what stands before its first tool call, and the calls."""

    content: str | None
    calls: tuple[ParsedCall, ...] = ()


def parse_tool_calls(text: str) -> ParsedText:
    """The content and tool calls of a generated text; one malformed call leaves all of it text."""
    calls = [_parse(body) for body in _CALL.findall(text)]
    good = tuple(call for call in calls if call is not None)
    if not good or len(good) < len(calls) or text.count(OPEN) != len(calls):
        return ParsedText(text)
    return ParsedText(text[: text.find(OPEN)].rstrip() or None, good)


def _parse(body: str) -> ParsedCall | None:
    try:
        fields = _object.decode(body)
        name: Any = _any.decode(fields["name"])
        raw = bytes(fields.get("arguments", b"{}"))
        arguments: Any = _any.decode(raw)
    except (msgspec.DecodeError, KeyError, RecursionError, UnicodeError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, raw.decode().strip())


def visible_length(text: str) -> int:
    """How much of a growing text can be streamed: up to a tool call, or to what may begin one.

    White space before it is held back too: it is not part of the content of a call.
    """
    start = text.find(OPEN)
    if start < 0:
        start = next(
            (
                len(text) - length
                for length in range(min(len(OPEN) - 1, len(text)), 0, -1)
                if OPEN.startswith(text[-length:])
            ),
            len(text),
        )
    return len(text[:start].rstrip())
