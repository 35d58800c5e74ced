"""Parsing of tool calls in generated text, in the format of the model's family.

| format | a call | models |
|---|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` anywhere | Qwen, Hermes |
| `mistral` | `[TOOL_CALLS]name[ARGS]{…}`, or an array as in `json`, anywhere | Mistral |
| `deepseek` | `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` anywhere | DeepSeek |
| `llama` | the whole answer is `{"name": …, "parameters": {…}}` | Llama 3.1 and later |
| `pythonic` | the whole answer is `[name(key=value, …)]`; in tags: anywhere | LFM2, Llama 4 |
| `json` | the whole answer is `{"name": …, "arguments": {…}}`, or an array of these | others |

`llama` also accepts `<|python_tag|>` before the calls, and several calls separated by `;`. `json`
also accepts a Markdown fence around the answer, or tags such as `<tool_calls>`. The tags of
`pythonic` are `<|tool_call_start|>` and `<|python_start|>`. If a call is
malformed, or has text around it that its format does not allow, the answer has no calls: it is the
text as the model wrote it. Text between `<think>` and `</think>` (the model's thoughts) is never a
call. It may precede a call even in the formats in which the call is the whole answer.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from lightspan.errors import ConfigError
from lightspan.schema.genai_messages import CALL_CLOSE, CALL_OPEN, PYTHON_TAG

THINK_OPEN: Final = "<think>"
THINK_CLOSE: Final = "</think>"
"""Tags around the thoughts of reasoning models."""

_Fields = Mapping[str, msgspec.Raw]

_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_WITHOUT_ARGUMENTS: Final = frozenset({"name", "id", "type"})
"""Fields of a call that has no arguments."""
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
    """A parsed text: the content without the tool calls, and the calls."""

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


class MarkedParser(ToolParser):
    """A parser of calls that begin with a mark and may stand anywhere outside thoughts.

    If one call is malformed, the whole answer is returned as text.
    """

    marks: tuple[str, ...]
    """Texts with which calls begin."""

    @abstractmethod
    def read(self, text: str, start: int) -> tuple[tuple[ParsedCall, ...], int]:
        """Return the tool calls whose mark is at `start`, and the position where their text ends.

        If they are malformed, no calls are returned.
        """

    def parse(self, text: str) -> ParsedText:
        calls: list[ParsedCall] = []
        pieces: list[str] = []
        position = 0
        while (start := _outside_thoughts(text, self.marks, position)) >= 0:
            some, end = self.read(text, start)
            if not some:
                return ParsedText(text)
            calls += some
            pieces.append(text[position:start])
            position = end
        if not calls:
            return ParsedText(text)
        before, *others = *pieces, text[position:]
        content = [before.rstrip(), *(piece.strip() for piece in others)]
        return ParsedText("\n".join(filter(None, content)) or None, tuple(calls))

    def visible_length(self, text: str) -> int:
        # white space before a call is not part of the content
        start = _outside_thoughts(text, self.marks, 0)
        if start < 0:
            start = len(text) - max(_overlap(text, mark) for mark in self.marks)
        return len(text[:start].rstrip())


class HermesParser(MarkedParser):
    """The parser of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; see the module."""

    marks = (CALL_OPEN,)
    _close: Final = re.compile(rf"\s*{CALL_CLOSE}")

    def read(self, text: str, start: int) -> tuple[tuple[ParsedCall, ...], int]:
        # an argument may contain the closing mark, so the end of the JSON is the end of the call
        body, end = _object_at(text, start + len(CALL_OPEN))
        closing = self._close.match(text, end)
        if body is None or closing is None:
            return (), end
        fields = _fields(body)
        # under another name than `arguments`, they would be lost
        default = b"{}" if fields is not None and fields.keys() <= _WITHOUT_ARGUMENTS else None
        return _calls([fields], "arguments", default), closing.end()


class MistralParser(MarkedParser):
    """The parser of `[TOOL_CALLS]name[ARGS]{…}`; see the module."""

    marks = ("[TOOL_CALLS]",)
    _array: Final = re.compile(r"\[TOOL_CALLS\]\s*(?=\[)")
    _name: Final = re.compile(
        r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)"
    )

    def read(self, text: str, start: int) -> tuple[tuple[ParsedCall, ...], int]:
        if array := self._array.match(text, start):
            body, end = _object_at(text, array.end())
            return ((), end) if body is None else (_calls(_one_or_more(body), "arguments"), end)
        if (name := self._name.match(text, start)) is None:
            return (), start
        body, end = _object_at(text, name.end())
        return () if body is None else (ParsedCall(name[1], body),), end


class DeepSeekParser(MarkedParser):
    """The parser of `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}`; see the module.

    Earlier models write `function<｜tool▁sep｜>` before the name, and the arguments in a Markdown
    fence.
    """

    marks = ("<｜tool▁call",)
    _name: Final = re.compile(
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        r"([\w.-]+)(?:<｜tool▁sep｜>|\s*\n```json\n)\s*(?=\{)"
    )
    _close: Final = re.compile(r"(?:\s*```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")

    def read(self, text: str, start: int) -> tuple[tuple[ParsedCall, ...], int]:
        if (name := self._name.match(text, start)) is None:
            return (), start
        body, end = _object_at(text, name.end())
        closing = self._close.match(text, end)
        if body is None or closing is None:
            return (), end
        return (ParsedCall(name[1], body),), closing.end()


class WholeParser(ToolParser):
    """A parser of answers that are nothing but calls, except for thoughts before them."""

    starts: tuple[str, ...]
    """Texts with which calls begin."""

    @abstractmethod
    def read(self, body: str) -> tuple[ParsedCall, ...]:
        """Return the calls in `body`, which has no white space around it; empty if it is text."""

    def parse(self, text: str) -> ParsedText:
        end = _end_of_thoughts(text)
        calls = self.read(text[end:].strip())
        return ParsedText(text[:end] or None, calls) if calls else ParsedText(text)

    def visible_length(self, text: str) -> int:
        end = _end_of_thoughts(text)
        return end + _length_unless_call(text[end:], self.starts)


class LlamaParser(WholeParser):
    """The parser of `{"name": …, "parameters": {…}}`; see the module."""

    starts = ("{", PYTHON_TAG)

    def read(self, body: str) -> tuple[ParsedCall, ...]:
        return _calls(_separated(body.removeprefix(PYTHON_TAG).strip()), "parameters")


class JsonParser(WholeParser):
    """The parser of `{"name": …, "arguments": {…}}` or an array of these; see the module."""

    starts = ("{", "[", "```", "<|tool_call", "<tool_call", "<TOOLCALL")
    _fence: Final = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
    _tag: Final = re.compile(r"<\|?/?tool_?calls?\|?>", re.IGNORECASE)

    def read(self, body: str) -> tuple[ParsedCall, ...]:
        fenced = self._fence.fullmatch(body)
        if fenced is None and (opening := self._tag.match(body)) is not None:
            end = [tag.start() for tag in self._tag.finditer(body)][-1] or len(body)
            is_closed = self._tag.fullmatch(body, end) is not None
            body = body[opening.end() : end if is_closed else len(body)].strip()
        return _calls(_one_or_more(fenced[1] if fenced else body), "arguments")


class PythonicParser(ToolParser):
    """The parser of `[name(key=value, …), …]`; see the module."""

    def parse(self, text: str) -> ParsedText:
        bare = _PythonicAnswer().parse(text)
        return bare if bare.calls else _PythonicTags().parse(text)

    def visible_length(self, text: str) -> int:
        parsers = (_PythonicAnswer(), _PythonicTags())
        return min(parser.visible_length(text) for parser in parsers)


_PYTHONIC_CLOSE: Final = re.compile(r"\s*(?:<\|tool_call_end\|>|<\|python_end\|>)")


class _PythonicAnswer(WholeParser):
    """The parser of a list that is the whole answer."""

    starts = ("[",)

    def read(self, body: str) -> tuple[ParsedCall, ...]:
        end = _list_end(body, 0)
        closing = _PYTHONIC_CLOSE.match(body, end)  # its opening tag may be in the prompt
        is_whole = (closing.end() if closing else end) == len(body)
        return _python_calls(body[:end]) if is_whole else ()


class _PythonicTags(MarkedParser):
    """The parser of lists in tags. The closing tag may be missing at the end of the answer."""

    marks = ("<|tool_call_start|>", "<|python_start|>")

    def read(self, text: str, start: int) -> tuple[tuple[ParsedCall, ...], int]:
        begin = text.index("|>", start) + len("|>")
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        end = _list_end(text, begin)
        closing = _PYTHONIC_CLOSE.match(text, end)
        if closing is None and text[end:].strip():
            return (), end
        return _python_calls(text[begin:end]), closing.end() if closing else len(text)


_PYTHON_PIECE: Final = re.compile(
    r"""('{3}|"{3}|'|")(?:\\.|(?!\1)[^\\])*(?:\1|\\?\Z)|[\[\](){}]""", re.DOTALL
)
"""A text or a bracket in Python's syntax. A text without an end reaches to the end."""


def _list_end(text: str, start: int) -> int:
    """Return the position after the Python list that begins at `start`.

    It is `start` if no list begins there, or the list has no end.
    """
    depth = 0
    if text.startswith("[", start):
        for piece in _PYTHON_PIECE.finditer(text, start):
            depth += (piece[0] in "[({") - (piece[0] in "])}")
            if depth == 0:
                return piece.end()
    return start


def _python_calls(text: str) -> tuple[ParsedCall, ...]:
    """Return the calls in a Python list; empty if it is anything else."""
    try:
        with warnings.catch_warnings():  # of a backslash that begins no escape
            warnings.simplefilter("ignore")
            tree = _JsonConstants().visit(ast.parse(text, mode="eval")).body
        return tuple(map(_python_call, tree.elts)) if isinstance(tree, ast.List) else ()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ()


class _JsonConstants(ast.NodeTransformer):
    """Replace the names of JSON's constants by their values."""

    values: Final = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.values[node.id]) if node.id in self.values else node


def _python_call(node: ast.expr) -> ParsedCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("this is no call with named arguments")
    arguments = {str(one.arg or ""): ast.literal_eval(one.value) for one in node.keywords}
    if "" in arguments:
        raise ValueError("a mapping is unpacked")
    mappings = (one.keys for one in ast.walk(node) if isinstance(one, ast.Dict))
    names = [[str(one.arg) for one in node.keywords]]
    names += [[ast.dump(key) for key in keys if key is not None] for keys in mappings]
    if any(len(set(group)) < len(group) for group in names):  # Python would keep the last value
        raise ValueError("a name is repeated")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ParsedCall(ast.unparse(node.func), text)


PARSERS: Final[Mapping[str, ToolParser]] = {
    "hermes": HermesParser(),
    "llama": LlamaParser(),
    "json": JsonParser(),
    "mistral": MistralParser(),
    "deepseek": DeepSeekParser(),
    "pythonic": PythonicParser(),
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
    """Return the tool calls in `objects`; empty if any of them is malformed.

    Args:
        objects: the calls' JSON objects; None for text that is no object.
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


def _object_at(text: str, start: int) -> tuple[str | None, int]:
    """Return the text of the JSON object or array at `start`, and the position of its end.

    White space before it is skipped. The text is None if there is no object or array, or it is
    malformed.
    """
    start = len(text) - len(text[start:].lstrip())
    try:
        value, end = _scanner.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    return text[start:end] if isinstance(value, dict | list) else None, end


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


# --- thoughts -------------------------------------------------------------------------------
def _outside_thoughts(text: str, marks: Sequence[str], position: int) -> int:
    """Return where one of `marks` first begins, outside thoughts; -1 if nowhere.

    Args:
        text: the text.
        marks: the marks.
        position: where to begin.
    """
    while True:
        starts = [text.find(mark, position) for mark in marks]
        start = min((start for start in starts if start >= 0), default=-1)
        thought = text.find(THINK_OPEN, position)
        if thought < 0 or 0 <= start < thought:
            return start
        position = text.find(THINK_CLOSE, thought)
        if position < 0:
            return -1


def _end_of_thoughts(text: str) -> int:
    """Return the length of the thoughts (`<think>…</think>`) with which `text` begins.

    If the thoughts have not ended yet, this is the length of `text`.
    """
    if not text.lstrip().startswith(THINK_OPEN):
        return 0
    end = text.find(THINK_CLOSE)
    return len(text) if end < 0 else end + len(THINK_CLOSE)


# --- streaming ------------------------------------------------------------------------------
def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` are the start of `marker`."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)


def _length_unless_call(text: str, markers: Sequence[str]) -> int:
    """Return the length of `text`; 0 if it is a tool call or the beginning of one.

    Args:
        text: the start of an answer.
        markers: texts with which a tool call starts.
    """
    start = text.lstrip()
    held = any(start.startswith(marker) or marker.startswith(start) for marker in markers)
    return 0 if held else len(text)
