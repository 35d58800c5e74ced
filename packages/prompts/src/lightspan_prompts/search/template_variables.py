"""Detection of program-generated parts in a single prompt text.

Such parts are dates, ids, paths, descriptions of tools and output formats. They must stay in the
prompt when it is rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from datetime import date
from typing import Final, NamedTuple

from lightspan_prompts.search.dates import date_places

_LABEL: Final = (
    r"(?:Thought|Action|Action Input|Observation|Final Answer|Tool|Tool Name|Tool Arguments|"
    r"Tool Description|Tool Input|Tool Output)"
)
_TAG: Final = (
    r"(?:tools?|functions?|schema|json_schema|output_format|output_schema|response_format|"
    r"output_structure|tool_call|tool_calls|available_tools)"
)

_KINDS: Final = {
    "format": (
        r"```[^\n]*\n.*?\n[ \t]*```",
        rf"<(?P<tag>{_TAG})\b[^<>]*>.*?</(?P=tag)>",
        # labelled lines, which a program parses or which describe tools
        rf"(?m:^[ \t]*{_LABEL}[ \t]*:[^\n]*(?:\n\s*{_LABEL}[ \t]*:[^\n]*)+)",
    ),
    "path": (
        r"\b[a-z][a-z0-9+.-]*://[^\s<>\"'`)\]}]+[^\s<>\"'`)\]}.,;:!?]",
        r"(?<![\w/.<])~?(?:/[\w.@+-]+){2,}/?",
        r"\b[A-Za-z]:\\[^\s\"'<>|]+",
    ),
    "id": (
        r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
        r"\b(?=[0-9a-f]*\d)(?=\d*[a-f])[0-9a-f]{12,}\b",
        r"\b\d{6,}\b",
        r"<key>",
    ),
}
"""Kind → patterns. The first match at a position counts."""


class Part(NamedTuple):
    """A part of a text that a program generated."""

    begin: int
    end: int
    kind: str
    """`format`, `date`, `path` or `id`."""


_PATTERNS: Final = [
    (kind, re.compile(pattern, re.DOTALL))
    for kind, several in _KINDS.items()
    for pattern in several
]
_OPENS: Final = re.compile(r"\{\s*[\"']|\[\s*[{\"']")
_MAX_BLOCK_LENGTH: Final = 50_000
"""Maximum characters searched for the end of a JSON value."""
_MAX_UNCLOSED: Final = 20
"""Maximum number of JSON values without an end before the search for values stops."""


def variable_parts(text: str, days: Collection[date] = ()) -> list[Part]:
    """Return the parts of a text that a program generated, in order.

    A part inside another part is left out.

    Args:
        text: the text.
        days: days on which an app may have sent the text (see `date_places`).
    """
    parts: list[Part] = []
    dates = [Part(*place, "date") for place in date_places(text, days)]
    for part in [*_json_parts(text), *dates, *_matches(text)]:
        if all(part.end <= other.begin or other.end <= part.begin for other in parts):
            parts.append(part)
        elif part.kind == "format":  # encloses others
            inside = [p for p in parts if part.begin <= p.begin and p.end <= part.end]
            crossing = [p for p in parts if p.begin < part.end and part.begin < p.end]
            if inside == crossing:
                parts = [*(p for p in parts if p not in inside), part]
    return sorted(parts)


def _matches(text: str) -> Iterator[Part]:
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            yield Part(match.start(), match.end(), kind)


def _json_parts(text: str) -> Iterator[Part]:
    """Yield the parts that are JSON or similar to it, such as `{"answer": "<one word>", …}`."""
    end, unclosed = 0, 0
    for match in _OPENS.finditer(text):
        if match.start() < end or unclosed == _MAX_UNCLOSED:
            continue
        close = _closing(text, match.start())
        if close is None:
            unclosed += 1
        else:
            end = close
            yield Part(match.start(), end, "format")


def _closing(text: str, begin: int) -> int | None:
    """Return the position after the closing bracket of the value at `begin`; None if missing."""
    depth, quoted, escaped = 0, False, False
    for at in range(begin, min(len(text), begin + _MAX_BLOCK_LENGTH)):
        char = text[at]
        if escaped:
            escaped = False
        elif quoted:
            escaped, quoted = char == "\\", char != '"'
        elif char == '"':
            quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return at + 1
    return None
