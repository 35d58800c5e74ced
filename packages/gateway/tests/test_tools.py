"""Tests of tool parsers: each format, malformed calls and streaming."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan.schema.genai_messages import CALL_CLOSE, CALL_OPEN
from lightspan_gateway.tools import PARSERS, ParsedCall, ParsedText, tool_parser


def call(name: str, arguments: str = "{}") -> ParsedCall:
    return ParsedCall(name, arguments)


F = call("f", '{"a": 1}')
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALLS: list[tuple[str, str, ParsedText]] = [
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        ParsedText("Let me see.", (F,)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
        '<tool_call>{"arguments":{ "b" :2.50 },"name":"g"}</tool_call>',
        ParsedText(None, (F, call("g", '{ "b" :2.50 }'))),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ParsedText(None, (call("f"),))),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', ParsedText(None, (F,))),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ParsedText(None, (F,))),
    (
        "llama",
        '\n {"type": "function", "name": "f", "parameters": {"a": 1}} ',
        ParsedText(None, (F,)),
    ),
    (
        "llama",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"s": "; {"}};\n'
        '{"name": "h", "parameters": {}}',
        ParsedText(None, (F, call("g", '{"s": "; {"}'), call("h"))),
    ),
    ("json", '{"name": "f", "arguments": {"a": 1}}', ParsedText(None, (F,))),
    ("json", '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     ParsedText(None, (F, call("g")))),
    ("json", '```json\n{"name": "f", "arguments": {"a": 1}}\n```', ParsedText(None, (F,))),
    ("json", '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>', ParsedText(None, (F,))),
    ("json", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', ParsedText(None, (F,))),
    ("mistral", 'So: [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
     ParsedText("So:", (F, call("g")))),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{"a": 1}', ParsedText(None, (F,))),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc"}]',
     ParsedText(None, (F,))),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', ParsedText(None, (F,))),
    ("deepseek", f'Look.{CALLS_BEGIN}{BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n```{END}\n'
     f"{BEGIN}function{SEP}g\n```json\n{{}}\n```{END}{CALLS_END}",
     ParsedText("Look.", (F, call("g")))),
    ("deepseek", f'{CALLS_BEGIN}{BEGIN}f{SEP}{{"a": 1}}{END}{CALLS_END}', ParsedText(None, (F,))),
    ("pythonic", "[f(a=1), g()]", ParsedText(None, (F, call("g")))),
    ("pythonic", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>", ParsedText(None, (F,))),
    ("pythonic", "[f(a=[True, null, {'b': \"it's\"}], c=-2.5)]",
     ParsedText(None, (call("f", '{"a": [true, null, {"b": "it\'s"}], "c": -2.5}'),))),
    ("pythonic", "<|tool_call_start|>[f(a=1)]", ParsedText(None, (F,))),
    ("pythonic", "[f(a=1)]<|tool_call_end|>", ParsedText(None, (F,))),
    ("pythonic", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Checking it.",
     ParsedText("Checking it.", (F,))),
    ("pythonic", "A <|python_start|>[f(a=1)]<|python_end|> B <|tool_call_start|>\n[g()]",
     ParsedText("A\nB", (F, call("g")))),
    ("pythonic", "<|tool_call_start|>[f(a=\"]'<|tool_call_end|>\")]<|tool_call_end|>[1]",
     ParsedText("[1]", (call("f", '{"a": "]\'<|tool_call_end|>"}'),))),
    ("pythonic", "[f(a='<|tool_call_start|>[g()]<|tool_call_end|>')]",
     ParsedText(None, (call("f", '{"a": "<|tool_call_start|>[g()]<|tool_call_end|>"}'),))),
    # text after and between calls
    ("hermes", 'A <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> B\n'
     '<tool_call>{"name": "g"}</tool_call>\nC.', ParsedText("A\nB\nC.", (F, call("g")))),
    # thoughts
    ("hermes", '<think>Maybe <tool_call>{"name": "g"}</tool_call>?</think>\n'
     '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
     ParsedText('<think>Maybe <tool_call>{"name": "g"}</tool_call>?</think>', (F,))),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<think>"}}</tool_call>',
     ParsedText(None, (call("f", '{"a": "<think>"}'),))),
    ("llama", '<think>Hm.</think>\n\n{"name": "f", "parameters": {"a": 1}}',
     ParsedText("<think>Hm.</think>", (F,))),
    ("pythonic", "<think>[g()]</think>[f(a=1)]", ParsedText("<think>[g()]</think>", (F,))),
]  # fmt: skip


@pytest.mark.parametrize("number", ["2e658", "9" * 5_000])
@pytest.mark.parametrize("name", sorted(PARSERS.keys() - {"pythonic"}))
def test_numbers_beyond_those_of_python(name: str, number: str) -> None:
    """JSON and grammars allow numbers that Python's types cannot represent."""
    field = "parameters" if name == "llama" else "arguments"
    value = f'{{"x": {number}}}'
    body = f'{{"name": "f", "{field}": {value}}}'
    texts = {
        "hermes": f"{CALL_OPEN}{body}{CALL_CLOSE}",
        "mistral": f"[TOOL_CALLS]f[ARGS]{value}",
        "deepseek": f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{value}<｜tool▁call▁end｜>",
    }
    text = texts.get(name, body)
    assert tool_parser(name).parse(text).calls == (call("f", f'{{"x": {number}}}'),)


TEXT: list[tuple[str, str]] = [
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>{</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>'),
    ("llama", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("llama", '{"name": "f", "arguments": {}}'),
    ("llama", '{"name": 1, "parameters": {}}'),
    ("llama", '{"name": "f", "parameters": {"a": NaN}}'),
    ("llama", '{"name": "f", "parameters": {}} and more'),
    ("llama", 'I call {"name": "f", "parameters": {}}'),
    ("llama", '{"name": "f", "parameters": {}}; {"name": "g"}'),
    ("llama", '<|python_tag|>search.call(query="x")'),
    ("llama", "[" * 100_000),
    ("json", '{"name": "f", "parameters": {}}'),
    ("json", "[]"),
    ("json", '[{"name": "f", "arguments": {}}, 3]'),
    ("json", 'Here: ```json\n{"name": "f", "arguments": {}}\n```'),
    ("json", '```json\n{"name": "f", "arguments": {}}\n```\n```json\n{}\n```'),
    ("hermes", '<think>I could <tool_call>{"name": "f"}</tool_call></think> No: 4.'),
    ("hermes", '<think>I could <tool_call>{"name": "f"}</tool_call> and'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{"),
    ("mistral", "[TOOL_CALLS]f[ARGS]3"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '<think>[TOOL_CALLS]f[ARGS]{"a": 1}</think>No.'),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜>"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=1), 3]"),
    ("pythonic", "[f(a=g())]"),
    ("pythonic", "[f(a={1, 2})]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(**{'a': 1})]"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[]"),
    ("pythonic", "[" * 100_000 + "]"),
    ("pythonic", "[x for x in y]"),
    ("pythonic", "Call [f(a=1)]"),
    ("pythonic", "[f(a=1)] and more"),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[f(a={'b': 1, 'b': 2})]"),
    ("pythonic", "<|tool_call_start|>[f(a=1)] and more"),
    ("pythonic", "<|tool_call_start|>[f(a=1]<|tool_call_end|>"),
    ("pythonic", "<|tool_call_start|>[f(a=1)]<|tool_call_end|><|tool_call_start|>[f("),
    ("pythonic", "<|tool_call_start|>f(a=1)<|tool_call_end|>"),
    ("pythonic", "[f(a=" + "\\'" * 50_000),
]


@pytest.mark.parametrize(("parser", "text", "parsed"), CALLS)
def test_calls(parser: str, text: str, parsed: ParsedText) -> None:
    assert tool_parser(parser).parse(text) == parsed


@pytest.mark.parametrize(("parser", "text"), TEXT)
def test_what_is_no_call_stays_text_exactly(parser: str, text: str) -> None:
    for variant in (text, f" \n{text}\n "):
        assert tool_parser(parser).parse(variant) == ParsedText(variant)


@pytest.mark.parametrize(
    ("parser", "text", "length"),
    [
        ("hermes", "Now <tool_c", 3),
        ("hermes", "Now \n<tool_call>{", 3),
        ("llama", "<|python_tag|>print", 0),
        ("llama", "<b>", 3),
        ("llama", ' {"nam', 0),
        ("llama", "The {", 5),
        ("json", "```json\n{", 0),
        ("json", "`a`", 3),
        ("json", "In [1]", 6),
        ("pythonic", "In [1]", 6),
        ("pythonic", "[f(", 0),
        ("pythonic", "So: <|tool_c", 3),
        ("pythonic", "So: <|python_start|>[f(a=1)]", 3),
    ],
)
def test_what_may_begin_a_call_is_held_back(parser: str, text: str, length: int) -> None:
    assert tool_parser(parser).visible_length(text) == length


PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "```json\n", "\n```", "<", "`", "{", "["),
    *('{"name": "f", "arguments": {"a": [1]}}', '{"name": "g", "parameters": {}}', "; ", ", ", "]"),
    *(" ", "\n", "a", "text", "<think>", "</think>", "[TOOL_CALLS]", "f[ARGS]{}", "[f(a=1)]"),
    *("<｜tool▁call▁begin｜>", "f<｜tool▁sep｜>{}", "<｜tool▁call▁end｜>", "<|tool_call_start|>"),
    *("<|tool_call_end|>", "<|python_start|>", "'", '"', "\\", "(", ")"),
]


@given(parser=st.sampled_from(sorted(PARSERS)), pieces=st.lists(st.sampled_from(PIECES)))
def test_what_was_streamed_is_in_the_content(parser: str, pieces: list[str]) -> None:
    """The visible part of a growing text is always a prefix of its content."""
    text = "".join(pieces)
    content = tool_parser(parser).parse(text).content or ""
    shown = [tool_parser(parser).visible_length(text[:end]) for end in range(len(text) + 1)]
    assert shown == sorted(shown)
    assert shown[-1] <= len(content)
    assert text[: shown[-1]] == content[: shown[-1]]


_json: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(), _json, max_size=3),
    name=st.text(min_size=1),
    ascii_only=st.booleans(),
)
def test_any_arguments_arrive_as_written(
    arguments: dict[str, Any], name: str, ascii_only: bool
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    for parser, key in (("hermes", "arguments"), ("llama", "parameters"), ("json", "arguments")):
        variant = f'{{"name": {json.dumps(name)}, "{key}": {written}}}'
        if parser == "hermes":
            if "</tool_call>" in variant or "<tool_call>" in variant:
                continue
            variant = f"<tool_call>{variant}</tool_call>"
        assert tool_parser(parser).parse(variant).calls == (ParsedCall(name, written),)
