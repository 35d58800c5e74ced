"""Tests of grammars: constraints of requests, matching answers and refused schemas."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lightspan.errors import UnsupportedError
from lightspan.protocols.engine import EngineCapabilities, ToolParserName
from lightspan.schema.records import Mode
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.dialects.chat import parse_chat
from lightspan_gateway.dialects.constraints import Constraint, Tool
from lightspan_gateway.dialects.openai_responses import parse_response
from lightspan_gateway.grammars import GrammarCache, closed, grammar_of
from lightspan_gateway.tools import tool_parser
from lightspan_testing.tiny import Family, tiny_model
from lightspan_torch.engine.grammars import GrammarMismatchError, Grammars
from lightspan_torch.engine.tokenizer import TransformersTokenizer, load_tokenizer

ADD = Tool(
    name="add",
    parameters={
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/Whole"}, "y": {"type": "integer"}},
        "required": ["x", "y"],
        "$defs": {"Whole": {"type": "integer"}},
    },
)
SAY = Tool(
    name="say",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)
TREE = Tool(
    name="tree",
    parameters={
        "type": "object",
        "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["v", "kids"],
    },
)
TOOLS = (ADD, SAY, TREE)
NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
CONSTRAINTS: dict[str, Constraint] = {
    "auto": Constraint(tools=TOOLS),
    "one": Constraint(tools=TOOLS, parallel=False),
    "required": Constraint(tools=TOOLS, calls="required"),
    "format": Constraint(format=NAMED),
    "format, tools": Constraint(format=NAMED, tools=TOOLS),
}
_ADDED = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>'
_BARE = '{"name": "add", "arguments": {"x": 1, "y": 2}}'
TEXTS: dict[ToolParserName, list[tuple[str, set[str]]]] = {
    "hermes": [
        ("hello", {"auto", "one"}),
        ("", {"auto", "one"}),
        (_ADDED, {"auto", "one", "required", "format, tools"}),
        (f"Well.\n{_ADDED}", {"auto", "one"}),
        (
            f'{_ADDED}\n<tool_call>\n{{"name": "tree", "arguments": {{"v": 1, "kids": '
            '[{"v": 2, "kids": []}]}}\n</tool_call>',
            {"auto", "required", "format, tools"},
        ),
        (f"{_ADDED} And so on.", set()),
        (f"<tool_call> Well.\n{_ADDED}", set()),
        (_ADDED.replace("add", "divide"), set()),
        (_ADDED.replace("1", "1.5"), set()),
        (_ADDED.replace('"y": 2', '"y": 2, "z": 3'), set()),
        ('{"name": "z", "n": 3}', {"auto", "one", "format", "format, tools"}),
        ('{"name": "z", "n": 3, "more": 1}', {"auto", "one"}),
    ],
    "llama": [
        ("", {"auto", "one"}),
        (_BARE.replace("arguments", "parameters"), {"auto", "one", "required", "format, tools"}),
        (
            '{"name": "add", "parameters": {"x": 1, "y": 2}}; '
            '{"name": "say", "parameters": {"text": "a"}}',
            {"auto", "required", "format, tools"},
        ),
        ('{"name": "divide", "parameters": {}}', set()),
        ('{"name": "z", "n": 3}', {"format", "format, tools"}),
        (" hello", {"auto", "one"}),
        (' {"name": "z"}', set()),
        ("<|python_tag|>x", set()),
    ],
    "json": [
        ("hello", {"auto", "one"}),
        (_BARE, {"auto", "one", "required", "format, tools"}),
        (
            f'[{_BARE}, {{"name":"say","arguments":{{"text":"q"}}}}]',
            {"auto", "required", "format, tools"},
        ),
        ("```\nx\n```", set()),
        (" [1]", set()),
        ('{"name": "z", "n": 3}', {"format", "format, tools"}),
    ],
}


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TransformersTokenizer:
    """Return a tokenizer: one with tokens for the marks around a call, and one without."""
    family: Family = request.param
    folder: Path = tiny_model(tmp_path_factory.mktemp("grammars") / family, seed=0, family=family)
    tokenizer = load_tokenizer(folder)
    assert ("<tool_call>" in tokenizer.tokenizer.get_vocab()) is (family == "qwen2")
    return tokenizer


@pytest.fixture(scope="module")
def grammars(tokenizer: TransformersTokenizer) -> Grammars:
    """Return grammars for a model that has more logits than its tokenizer has tokens."""
    vocabulary = len(tokenizer.tokenizer) + 3
    return Grammars(tokenizer.tokenizer, vocabulary=vocabulary, eos_ids=tokenizer.eos_ids)


# --- what an answer may be ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("parser", "text", "allowing"),
    [(parser, text, names) for parser, texts in TEXTS.items() for text, names in texts],
)
def test_texts_are_told_apart(
    tokenizer: TransformersTokenizer,
    grammars: Grammars,
    parser: ToolParserName,
    text: str,
    allowing: set[str],
) -> None:
    """Check that a text matches exactly the constraints `allowing`."""
    for eos in tokenizer.eos_ids:
        ids = [*tokenizer.encode(text), eos]
        passed = {
            name
            for name, constraint in CONSTRAINTS.items()
            if _follows(grammars, grammar_of(constraint, parser), ids)
        }
        assert passed == allowing


@pytest.mark.parametrize("parser", TEXTS)
def test_what_a_grammar_calls_a_call_is_read_as_one(parser: ToolParserName) -> None:
    for text, allowing in TEXTS[parser]:
        if "required" in allowing:
            calls = tool_parser(parser).parse(text).calls
            assert calls, text
            assert {call.name for call in calls} <= {"add", "say", "tree"}


def test_an_argument_may_hold_the_closing_mark(
    tokenizer: TransformersTokenizer, grammars: Grammars
) -> None:
    """Check that an argument may contain the closing mark as text; a token for the mark ends the
    call.
    """
    text = '<tool_call>\n{"name": "say", "arguments": {"text": "</tool_call>"}}\n</tool_call>'
    start = text.index("</tool_call>")
    spelled = (text[11:start], "</tool", "_call>", text[start + 12 : -12])
    ids: list[int] = []
    for part in ("<tool_call>", *spelled, "</tool_call>"):
        ids += tokenizer.encode(part)
    assert tokenizer.decode(ids) == text
    assert _follows(grammars, grammar_of(CONSTRAINTS["required"], "hermes"), ids)
    (call,) = tool_parser("hermes").parse(text).calls
    assert (call.name, call.arguments) == ("say", '{"text": "</tool_call>"}')


def test_a_text_never_spells_the_mark(tokenizer: TransformersTokenizer, grammars: Grammars) -> None:
    """Check that a text cannot contain the opening mark, which would be parsed as a malformed
    call.
    """
    spelled = [*tokenizer.encode("<tool"), *tokenizer.encode("_call> it")]
    assert tokenizer.decode(spelled) == "<tool_call> it"
    grammar = grammar_of(CONSTRAINTS["auto"], "hermes")
    eos = min(tokenizer.eos_ids)
    assert not _follows(grammars, grammar, [*spelled, eos])
    assert not _follows(grammars, grammar, [*spelled, *tokenizer.encode(_ADDED), eos])
    assert _follows(grammars, grammar, [*tokenizer.encode("<tool"), eos])


def _follows(grammars: Grammars, grammar: str, ids: list[int]) -> bool:
    try:
        grammars.masks(grammar, ids)
    except GrammarMismatchError:
        return False
    return True


# --- schemas --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object"}, {"type": "object"}),
        (
            {"properties": {"properties": {"properties": {}}}},
            {
                "properties": {"properties": {"properties": {}, "additionalProperties": False}},
                "additionalProperties": False,
            },
        ),
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        ),
        (  # alternatives of one value
            {"anyOf": [{"properties": {"a": {}}}, {"type": "null"}]},
            {"anyOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"type": "null"}]},
        ),
        (
            {"enum": [{"properties": {}}], "default": {"properties": {}}},
            {"enum": [{"properties": {}}], "default": {"properties": {}}},
        ),
    ],
)
def test_objects_are_closed_where_a_schema_leaves_that_open(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = repr(schema)
    assert closed(schema) == expected
    assert repr(schema) == before


OPERATION = {
    "properties": {"op": {"enum": ["add", "del"]}, "v": {"type": "integer"}},
    "required": ["op"],
    "anyOf": [
        {"properties": {"op": {"const": "add"}}, "required": ["v"]},
        {"properties": {"op": {"const": "del"}}},
    ],
}
BASE = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
NOTE = {"properties": {"note": {"type": "string"}}, "required": ["note"]}
SHARED: list[tuple[dict[str, Any], str]] = [
    (OPERATION, '{"op": "add", "v": 1}'),
    (
        {"$defs": {"Base": BASE}, "allOf": [{"$ref": "#/$defs/Base"}, NOTE]},
        '{"id": 1, "note": "a"}',
    ),
    ({"$defs": {"Base": BASE}, "$ref": "#/$defs/Base", **NOTE}, '{"id": 1, "note": "a"}'),
]


@pytest.mark.parametrize(("schema", "text"), SHARED)
def test_what_a_schema_allows_can_be_said(
    tokenizer: TransformersTokenizer, grammars: Grammars, schema: dict[str, Any], text: str
) -> None:
    """Check schemas as response formats and as tool parameters, with keys in any order."""
    jsonschema.validate(json.loads(text), schema)
    format = Constraint(format=schema)
    tool = Tool(name="f", parameters=schema)
    forced = Constraint(tools=(tool,), calls="required", parallel=False)
    value = json.loads(text)
    orders = [json.dumps(dict(items)) for items in permutations(value.items())]
    assert any(
        _follows(grammars, grammar_of(format, "hermes"), tokenizer.encode(one)) for one in orders
    )
    calls = [f'{{"name": "f", "parameters": {one}}}' for one in orders]
    assert any(
        _follows(grammars, grammar_of(forced, "llama"), tokenizer.encode(one)) for one in calls
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "lookahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "missing": ({"$ref": "#/$defs/Nobody"}, "Nobody"),
    "remote": ({"$ref": "https://example.com/schema"}, "example.com"),
    "impossible": ({"type": "integer", "minimum": 2, "maximum": 1}, "nsatisfiable"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_library_cannot_do_is_refused_with_its_reason(
    grammars: Grammars, name: str
) -> None:
    """Check that an unsupported schema is refused instead of being followed in part."""
    schema, reason = REFUSED[name]
    wrapped = {"type": "object", "properties": {"it": schema}, "required": ["it"]}
    tool = Tool(name="f", parameters=wrapped)
    for constraint in (Constraint(format=wrapped), Constraint(tools=(tool,), calls="required")):
        with pytest.raises(UnsupportedError, match=reason) as caught:
            grammars.check(grammar_of(constraint, "hermes"))
        assert "\n" not in str(caught.value)


class _Engine:
    """An engine that compiles grammars immediately, or after an event is set."""

    capabilities = EngineCapabilities(exact_tokens=True, grammars="the script")

    def __init__(self, *, is_slow: bool = False) -> None:
        self.go_on = threading.Event()
        if not is_slow:
            self.go_on.set()

    def check_grammar(self, policy: str, grammar: str) -> None:
        assert self.go_on.wait(60)


async def _refusal(engine: Any, schema: Any, *, compile_timeout_s: float = 60.0) -> ApiError:
    cache = GrammarCache(compile_timeout_s)
    constraint = Constraint(source=("response_format", schema), format=schema)
    with pytest.raises(ApiError) as caught:
        await cache.grammar(constraint, engine, "policy", "hermes")
    engine.go_on.set()
    cache.close()
    assert (caught.value.status, caught.value.param) == (400, "response_format")
    return caught.value


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        # the library would crash the process
        ({"const": -(2**63)}, "the number -9223372036854775808; the minimum is"),
        # this takes minutes and gigabytes
        ({"properties": {"a": {"multipleOf": 9_999_991}}}, "multipleOf is 9999991"),
        ({"properties": {f"p{n}": {} for n in range(40_000)}}, "a grammar of 469,061"),
    ],
)
async def test_what_the_library_would_fail_at_is_refused(schema: Any, reason: str) -> None:
    assert re.search(reason, (await _refusal(_Engine(), schema)).message)


async def test_a_grammar_that_takes_too_long_is_refused() -> None:
    engine = _Engine(is_slow=True)
    refusal = await _refusal(engine, {"type": "object"}, compile_timeout_s=0.05)
    assert "takes over 0.05 s to compile" in refusal.message


# --- what a request asks --------------------------------------------------------------------
def _tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


ANY = {"type": "object"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tools": [_tool("f")], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [_tool("f", strict=True)], "tool_choice": "none"},
        {"parallel_tool_calls": False},
    ],
)
def test_what_constrains_nothing(fields: dict[str, Any]) -> None:
    assert _chat(fields) is None


def test_formats() -> None:
    """Check that a named schema is nested in chat completions, and flat in the Responses API."""
    object_format = {"type": "json_object"}
    expected = Constraint(source=("response_format", object_format), format=ANY)
    assert _chat({"response_format": object_format}) == expected
    inner = {"name": "it", "schema": SCHEMA, "strict": True}
    chat = _chat({"response_format": {"type": "json_schema", "json_schema": inner}})
    answer = _response({"text": {"format": {"type": "json_schema", **inner}}})
    assert chat is not None
    assert answer is not None
    assert chat.format == SCHEMA
    assert answer.format == SCHEMA


@pytest.mark.parametrize(
    ("choice", "names", "calls", "parallel"),
    [
        ("auto", ["f", "g"], "auto", True),
        ("required", ["f", "g"], "required", True),
        # a named function is called exactly once
        ({"type": "function", "function": {"name": "g"}}, ["g"], "required", False),
        ({"type": "function", "name": "g"}, ["g"], "required", False),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            },
            ["f"],
            "auto",
            True,
        ),
    ],
)
def test_which_tools_may_be_called(
    choice: Any, names: list[str], calls: str, parallel: bool
) -> None:
    tools = [_tool("f", parameters=SCHEMA, strict=True), _tool("g", parameters=SCHEMA)]
    constraint = _chat({"tools": tools, "tool_choice": choice})
    assert constraint is not None
    assert [tool.name for tool in constraint.tools] == names
    assert (constraint.calls, constraint.parallel) == (calls, parallel)
    # a tool that is not strict follows its schema only if a call is forced
    schemas = {tool.name: tool.parameters for tool in constraint.tools}
    assert schemas.get("f", SCHEMA) == SCHEMA
    assert schemas.get("g", ANY) == (SCHEMA if calls == "required" else ANY)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "type 'xml'"),
        ({"tool_choice": "required"}, "tool_choice", "names no tool; there are: none"),
        ({"tools": [_tool("f")], "tool_choice": 5}, "tool_choice", "not understood"),
        (
            {"tools": [_tool("f", parameters=[])], "tool_choice": "required"},
            "tools[0]",
            "must be an object",
        ),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls", "must be true or false, not 0"),
        ({"tools": [_tool("f", strict="true")]}, "tools[0]", "must be true or false"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format",
            "takes no schema",
        ),
        (
            {"tools": [_tool("f")], "tool_choice": {"type": "allowed_tools", "allowed_tools": 5}},
            "tool_choice",
            "not understood",
        ),
    ],
)
def test_what_is_not_understood(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        _chat(fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def _chat(fields: Mapping[str, Any]) -> Constraint | None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(body, mode=Mode.TRAIN, forced=None).constraint


def _response(fields: Mapping[str, Any]) -> Constraint | None:
    return parse_response({"input": "hi", **fields}, mode=Mode.TRAIN, forced=None).constraint
