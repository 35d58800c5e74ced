"""Parses tool calls in generated text, in the format of the model's family.

| format | a call | for example |
|---|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` anywhere | Qwen, Hermes |
| `llama` | the whole answer is `{"name": …, "parameters": {…}}` | Llama 3.1 and later |
| `json` | the whole answer is `{"name": …, "arguments": {…}}`, or an array of these | others |

`llama` takes an answer that begins with `<|python_tag|>` too, and several calls separated by `;`.
`json` takes an answer in a Markdown fence too. A call whose JSON is malformed, or with more text
around it than its format allows, stays text, exactly as the model wrote it; nothing is repaired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from lightspan.errors import ConfigError
from lightspan.schema.genai_messages import CALL_CLOSE, CALL_OPEN, PYTHON_TAG

_Fields = Mapping[str, msgspec.Raw]

_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_any: Final = msgspec.json.Decoder()


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


# Numbers stay text: one that JSON allows may be beyond what Python's numbers hold.
_scanner: Final = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_no_number)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call; `arguments` is the JSON text as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A generated text: the content before its first tool call, and the calls."""

    content: str | None
    calls: tuple[ParsedCall, ...] = ()


class ToolParser(Protocol):
    """Finds the tool calls of one format."""

    def parse(self, text: str) -> ParsedText:
        """Return the content and tool calls of a finished text."""
        ...

    def visible_length(self, text: str) -> int:
        """Return the length of the content that can be streamed, whatever follows."""
        ...


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several of them, after text or not.

    One malformed call leaves all of the answer text.
    """

    _open: Final = re.compile(rf"{CALL_OPEN}\s*")
    _close: Final = re.compile(rf"\s*{CALL_CLOSE}")

    def parse(self, text: str) -> ParsedText:
        calls = _calls(list(self._bodies(text)), _hermes_call)
        if not calls:
            return ParsedText(text)
        return ParsedText(text[: text.find(CALL_OPEN)].rstrip() or None, calls)

    def _bodies(self, text: str) -> Iterator[_Fields | None]:
        """Yield each call's object, None where it is malformed.

        An argument may contain the closing mark, so a call ends where its JSON does.
        """
        position = 0
        while opening := self._open.search(text, position):
            try:
                _, end = _scanner.raw_decode(text, opening.end())
            except (ValueError, RecursionError):
                yield None
                return
            closing = self._close.match(text, end)
            if closing is None:
                yield None
                return
            yield _fields(text[opening.end() : end])
            position = closing.end()

    def visible_length(self, text: str) -> int:
        # White space before a call is held back too: it is not part of the content.
        start = text.find(CALL_OPEN)
        return len(text[: len(text) - _overlap(text, CALL_OPEN) if start < 0 else start].rstrip())


class LlamaParser(ToolParser):
    """`{"name": …, "parameters": {…}}`, nothing but that; see the module."""

    def parse(self, text: str) -> ParsedText:
        body = text.strip().removeprefix(PYTHON_TAG).strip()
        calls = _calls(_separated(body), _llama_call)
        return ParsedText(None, calls) if calls else ParsedText(text)

    def visible_length(self, text: str) -> int:
        return _none_if_it_begins(text, ("{", PYTHON_TAG))


class JsonParser(ToolParser):
    """`{"name": …, "arguments": {…}}` or an array of these, nothing but that; see the module."""

    _fence: Final = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)

    def parse(self, text: str) -> ParsedText:
        body = text.strip()
        fenced = self._fence.fullmatch(body)
        calls = _calls(_one_or_more(fenced[1] if fenced else body), _json_call)
        return ParsedText(None, calls) if calls else ParsedText(text)

    def visible_length(self, text: str) -> int:
        return _none_if_it_begins(text, ("{", "[", "```"))


PARSERS: Final[Mapping[str, ToolParser]] = {
    "hermes": HermesParser(),
    "llama": LlamaParser(),
    "json": JsonParser(),
}
"""By `ChatTokenizer.tool_parser`."""


def tool_parser(name: str) -> ToolParser:
    """Return the parser of a format.

    Raises:
        ConfigError: there is none of that name.
    """
    try:
        return PARSERS[name]
    except KeyError:
        known = ", ".join(PARSERS)
        raise ConfigError(f"there is no tool parser {name!r}; there are {known}") from None


# --- reading --------------------------------------------------------------------------------


def _calls(
    found: Sequence[_Fields | None], read: Callable[[_Fields], ParsedCall | None]
) -> tuple[ParsedCall, ...]:
    """Return the calls, or none if one is malformed."""
    calls = [None if fields is None else read(fields) for fields in found]
    good = tuple(call for call in calls if call is not None)
    return good if len(good) == len(calls) else ()


def _fields(body: str) -> _Fields | None:
    try:
        return _object.decode(body)
    except _MALFORMED:
        return None


def _one_or_more(body: str) -> list[_Fields | None]:
    """Parse an object, or an array of objects."""
    if not body.lstrip().startswith("["):
        return [_fields(body)]
    try:
        return list(_objects.decode(body))
    except _MALFORMED:
        return [None]


def _separated(body: str) -> list[_Fields | None]:
    """Parse objects separated by semicolons."""
    found: list[_Fields | None] = []
    position = 0
    while True:
        try:
            _, end = _scanner.raw_decode(body, position)
        except (ValueError, RecursionError):
            return [None]
        found.append(_fields(body[position:end]))
        rest = body[end:].lstrip()
        if not rest:
            return found
        if not rest.startswith(";"):
            return [None]
        position = len(body) - len(rest[1:].lstrip())


def _hermes_call(fields: _Fields) -> ParsedCall | None:
    return _call_of(fields, fields.get("arguments", msgspec.Raw(b"{}")))


def _llama_call(fields: _Fields) -> ParsedCall | None:
    return _call_of(fields, fields.get("parameters"))


def _json_call(fields: _Fields) -> ParsedCall | None:
    return _call_of(fields, fields.get("arguments"))


def _call_of(fields: _Fields, raw: msgspec.Raw | None) -> ParsedCall | None:
    """Return the call if its arguments are an object and it has a name."""
    if raw is None or "name" not in fields:
        return None
    try:
        name: Any = _any.decode(fields["name"])
        written = bytes(raw).decode().strip()
        arguments: Any = _scanner.decode(written)
    except (*_MALFORMED, ValueError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, written)


_MALFORMED: Final = (msgspec.DecodeError, RecursionError, UnicodeError)


# --- streaming ------------------------------------------------------------------------------
def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of the text may begin the marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)


def _none_if_it_begins(text: str, markers: Sequence[str]) -> int:
    """Return 0 while the text begins, or may begin, with a marker, else its length."""
    start = text.lstrip()
    held = any(start.startswith(marker) or marker.startswith(start) for marker in markers)
    return 0 if held else len(text)


__all__ = [
    "PARSERS",
    "HermesParser",
    "JsonParser",
    "LlamaParser",
    "ParsedCall",
    "ParsedText",
    "ToolParser",
    "tool_parser",
]
