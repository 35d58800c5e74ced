"""Parsing of tool calls in generated text, in the format of the model's family.

| format | a call | models |
|---|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` anywhere | Qwen, Hermes |
| `llama` | the whole answer is `{"name": …, "parameters": {…}}` | Llama 3.1 and later |
| `json` | the whole answer is `{"name": …, "arguments": {…}}`, or an array of these | others |

`llama` also accepts `<|python_tag|>` before the calls, and several calls separated by `;`. `json`
also accepts a Markdown fence around the answer. If the JSON of a call is malformed, or if a call
has more text around it than its format allows, the answer is text, exactly as the model wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from lightspan.errors import ConfigError
from lightspan.schema.genai_messages import CALL_CLOSE, CALL_OPEN, PYTHON_TAG

_Fields = Mapping[str, msgspec.Raw]

_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_MALFORMED: Final = (msgspec.DecodeError, RecursionError, ValueError)


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


# numbers stay text: JSON allows numbers that Python's types cannot represent
_scanner: Final = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_reject_constant)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call."""

    name: str
    arguments: str
    """JSON exactly as the model wrote it."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A parsed text: the content before the first tool call, and the calls."""

    content: str | None
    calls: tuple[ParsedCall, ...] = ()


class ToolParser(Protocol):
    """A parser of tool calls in one format."""

    def parse(self, text: str) -> ParsedText:
        """Return the content and tool calls of a finished text."""

    def visible_length(self, text: str) -> int:
        """Return how many characters at the start of an unfinished text are certainly content.

        The rest may turn out to belong to a tool call.
        """


class HermesParser(ToolParser):
    """The parser of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; see the module.

    If one call is malformed, the whole answer is returned as text.
    """

    _open: Final = re.compile(rf"{CALL_OPEN}\s*")
    _close: Final = re.compile(rf"\s*{CALL_CLOSE}")

    def parse(self, text: str) -> ParsedText:
        calls = _calls(list(self._bodies(text)), "arguments", default=b"{}")
        if not calls:
            return ParsedText(text)
        return ParsedText(text[: text.find(CALL_OPEN)].rstrip() or None, calls)

    def _bodies(self, text: str) -> Iterator[_Fields | None]:
        """Yield the JSON object of each call in `text`; None for a malformed call.

        An argument may contain the closing mark, so the end of the JSON is the end of the call.
        """
        position = 0
        while opening := self._open.search(text, position):
            try:
                _, end = _scanner.raw_decode(text, opening.end())
                closing = self._close.match(text, end)
            except (ValueError, RecursionError):
                closing = None
            if closing is None:
                yield None
                return
            yield _fields(text[opening.end() : end])
            position = closing.end()

    def visible_length(self, text: str) -> int:
        # white space before a call is not part of the content
        start = text.find(CALL_OPEN)
        return len(text[: len(text) - _overlap(text, CALL_OPEN) if start < 0 else start].rstrip())


class LlamaParser(ToolParser):
    """The parser of `{"name": …, "parameters": {…}}`; see the module."""

    def parse(self, text: str) -> ParsedText:
        body = text.strip().removeprefix(PYTHON_TAG).strip()
        calls = _calls(_separated(body), "parameters")
        return ParsedText(None, calls) if calls else ParsedText(text)

    def visible_length(self, text: str) -> int:
        return _length_unless_call(text, ("{", PYTHON_TAG))


class JsonParser(ToolParser):
    """The parser of `{"name": …, "arguments": {…}}` or an array of these; see the module."""

    _fence: Final = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)

    def parse(self, text: str) -> ParsedText:
        body = text.strip()
        fenced = self._fence.fullmatch(body)
        calls = _calls(_one_or_more(fenced[1] if fenced else body), "arguments")
        return ParsedText(None, calls) if calls else ParsedText(text)

    def visible_length(self, text: str) -> int:
        return _length_unless_call(text, ("{", "[", "```"))


PARSERS: Final[Mapping[str, ToolParser]] = {
    "hermes": HermesParser(),
    "llama": LlamaParser(),
    "json": JsonParser(),
}
"""`ChatTokenizer.tool_parser` → parser."""


def tool_parser(name: str) -> ToolParser:
    """Return the parser of a format.

    Raises:
        ConfigError: the format is unknown.
    """
    if name not in PARSERS:
        raise ConfigError(f"there is no tool parser {name!r}; there are {', '.join(PARSERS)}")
    return PARSERS[name]


# --- parsing --------------------------------------------------------------------------------
def _calls(
    objects: Sequence[_Fields | None], arguments: str, default: bytes | None = None
) -> tuple[ParsedCall, ...]:
    """Return the calls; empty if one is malformed.

    Args:
        objects: the calls' JSON objects.
        arguments: name of the field with the arguments.
        default: arguments of a call without that field; None if every call must have it.
    """
    calls: list[ParsedCall] = []
    for fields in objects:
        raw = None if fields is None else fields.get(arguments, default)
        if fields is None or raw is None or "name" not in fields:
            return ()
        try:
            name: Any = msgspec.json.decode(fields["name"])
            text = bytes(raw).decode().strip()
            is_call = isinstance(name, str) and isinstance(_scanner.decode(text), dict)
        except _MALFORMED:
            return ()
        if not is_call:
            return ()
        calls.append(ParsedCall(name, text))
    return tuple(calls)


def _fields(body: str) -> _Fields | None:
    try:
        return _object.decode(body)
    except _MALFORMED:
        return None


def _one_or_more(body: str) -> list[_Fields | None]:
    """Parse an object, or an array of objects; return [None] for malformed JSON."""
    if not body.lstrip().startswith("["):
        return [_fields(body)]
    try:
        return list(_objects.decode(body))
    except _MALFORMED:
        return [None]


def _separated(body: str) -> list[_Fields | None]:
    """Parse objects separated by semicolons; return [None] for malformed text."""
    objects: list[_Fields | None] = []
    position = 0
    while True:
        try:
            _, end = _scanner.raw_decode(body, position)
        except (ValueError, RecursionError):
            return [None]
        objects.append(_fields(body[position:end]))
        rest = body[end:].lstrip()
        if not rest:
            return objects
        if not rest.startswith(";"):
            return [None]
        position = len(body) - len(rest[1:].lstrip())


# --- streaming ------------------------------------------------------------------------------
def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` are the start of `marker`."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)


def _length_unless_call(text: str, markers: Sequence[str]) -> int:
    """Return 0 if `text` is, or may become, a tool call; else return its length.

    Args:
        text: the start of an answer.
        markers: texts with which a tool call starts.
    """
    start = text.lstrip()
    held = any(start.startswith(marker) or marker.startswith(start) for marker in markers)
    return 0 if held else len(text)
