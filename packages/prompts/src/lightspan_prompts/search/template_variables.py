"""What of a text is filled in by a program, as far as one text alone shows it: dates, ids, paths,
blocks of tools and of formats. Whoever writes that text anew has to keep them as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_MONTH: Final = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
    r"Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY: Final = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_HOUR: Final = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?(?: ?(?:Z|UTC|GMT)\b)?"
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
        # what a program reads back, or was told of tools: lines with labels
        rf"(?m:^[ \t]*{_LABEL}[ \t]*:[^\n]*(?:\n\s*{_LABEL}[ \t]*:[^\n]*)+)",
    ),
    "date": (
        rf"(?:{_DAY},? )?(?:\d{{4}}-\d{{2}}-\d{{2}})(?:[T ]{_HOUR}(?:[+-]\d{{2}}:?\d{{2}})?)?",
        rf"(?:\b{_DAY},? )?\b{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}\b",
        rf"(?:\b{_DAY},? )?\b\d{{1,2}}(?:st|nd|rd|th|\.)? {_MONTH}\.?,? \d{{4}}\b",
        r"\b\d{1,2}([./])\d{1,2}\1\d{2,4}\b",
        rf"\b{_HOUR}",
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
"""Kind → how it looks. The first one that is found at a place counts."""


class Part(NamedTuple):
    """A part of a text that is filled in."""

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
"""Characters in which the end of a JSON value is looked for."""
_MAX_UNCLOSED: Final = 20
"""Values without an end, after which no further one is looked for."""


def variable_parts(text: str) -> list[Part]:
    """Those of a text, in order; none within another."""
    parts: list[Part] = []
    for part in [*_json_parts(text), *_matches(text)]:
        if all(part.end <= other.begin or other.end <= part.begin for other in parts):
            parts.append(part)
        elif part.kind == "format":  # around others
            inside = [p for p in parts if part.begin <= p.begin and p.end <= part.end]
            crossing = [p for p in parts if p.begin < part.end and part.begin < p.end]
            if inside == crossing:
                parts = [*(p for p in parts if p not in inside), part]
    return sorted(parts)


def _matches(text: str) -> Iterator[Part]:
    for kind, pattern in _PATTERNS:
        for found in pattern.finditer(text):
            yield Part(found.start(), found.end(), kind)


def _json_parts(text: str) -> Iterator[Part]:
    """JSON values, whole or only shaped like one: `{"answer": "<one word>", …}`."""
    end, unclosed = 0, 0
    for found in _OPENS.finditer(text):
        if found.start() < end or unclosed == _MAX_UNCLOSED:
            continue
        close = _closing(text, found.start())
        if close is None:
            unclosed += 1
        else:
            end = close
            yield Part(found.start(), end, "format")


def _closing(text: str, begin: int) -> int | None:
    """Where the value that begins there ends: behind its last bracket."""
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
