"""Schemas that cost too much, that no answer can follow to its end, or that ask for a call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan.gateway.schemas import SchemaError, check_schemas, may_be_call

TEXT = {"type": "string"}


def a_property(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **fields}


def laughs(levels: int) -> dict[str, Any]:
    """Joined with itself, each level is joined twice as often as the one above."""
    both = [
        {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{n}"} for key in "ab"}}
        for n in range(1, levels + 1)
    ]
    definitions = {f"d{n}": schema for n, schema in enumerate([*both, TEXT])}
    return {"allOf": [{"$ref": "#/$defs/d0"}] * 2, "$defs": definitions}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = dict(TEXT)
    for _ in range(levels):
        schema = {"items": schema}
    return schema


TREE = a_property({"type": "array", "items": {"$ref": "#"}})
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "multipleOf": (a_property({"type": "integer", "multipleOf": 9_999_991}), "multipleOf"),
    "a long fraction": ({"type": "number", "multipleOf": 1.234567}, "multiples of 1,234,567"),
    "multipleOf of several": (
        {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 101}]},
        "multiples of 100,697",
    ),
    "multipleOf by reference": (
        {"$ref": "#/$defs/a", "multipleOf": 101, "$defs": {"a": {"multipleOf": 997}}},
        "multiples of 100,697",
    ),
    "many multipleOf": (
        {"prefixItems": [{"multipleOf": 9_000 + n} for n in range(4)]},
        "at most 30,000",
    ),
    "joined": (laughs(20), "join schemas"),
    "alternatives": (
        {"allOf": [{"anyOf": [{"pattern": f"{n}x{m}"} for n in range(8)]} for m in range(5)]},
        "join schemas",
    ),
    "deep": (nested(100), "more than 100 levels"),
    "properties": (
        {"properties": {f"p{n}": {} for n in range(2_001)}},
        "the properties of the request's schemas are 2,002, at most 2,000",
    ),
    "schemas": ({"prefixItems": [{}] * 5_000}, "are 5,004, at most 5,000"),
    # these would end the process: the library's compiler runs out of stack
    "smallest": ({"const": -(2**63)}, "it has the number -9223372036854775808: none below"),
    "rounded": ({"enum": [{"a": [-(2**63) + 512]}]}, "the number -9223372036854775296"),
    "least": (a_property({"type": "integer", "minimum": -(2**63) + 1}), "-9223372036854775807"),
    "lower": ({"type": "integer", "const": -1e308}, "the number -1e\\+308"),
    # and this go on for minutes
    "negative multiple": ({"multipleOf": -(2**31)}, "multipleOf is -2147483648; it must be above"),
    "no multiple": ({"allOf": [{"multipleOf": 0}]}, "multipleOf is 0; it must be above 0"),
    "itself": ({"$ref": "#"}, "'#' asks for itself"),
    "itself inside": (a_property({"$ref": "#"}), "'#' asks for itself"),
    "in turns": (
        {"$ref": "#/$defs/a", "$defs": {"a": a_property({"$ref": "#/$defs/b"}), "b": TREE | {
            "properties": {"a": {"$ref": "#/$defs/a"}}}}},
        "'#/$defs/a' asks for itself",
    ),
    "all of": ({"allOf": [TREE, {"$ref": "#"}]}, "asks for itself"),
    "any of": ({"anyOf": [{"$ref": "#"}, a_property({"$ref": "#"})]}, "asks for itself"),
    "items": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "asks for itself"),
    "other properties": (
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        "asks for itself",
    ),
}  # fmt: skip


def expressions(kinds: int) -> dict[str, Any]:
    """What Pydantic makes of as many classes whose two fields each are any of them, or a number: a
    title beside every union."""
    union = {"anyOf": [{"$ref": f"#/$defs/Kind{n}"} for n in range(kinds)] + [{"type": "number"}]}
    kind = {
        "type": "object",
        "title": "Kind",
        "properties": {
            "left": {**union, "title": "Left"},
            "right": {**union, "title": "Right", "description": "The other side.", "default": 0},
        },
        "required": ["left"],
    }
    return {"$defs": {f"Kind{n}": kind for n in range(kinds)}, **union, "title": "Expression"}


FOLLOWED: dict[str, dict[str, Any]] = {
    "titles beside unions": expressions(8),
    "tree": TREE,
    "optional": {"type": "object", "properties": {"a": {"$ref": "#"}}},
    "nullable": a_property({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "of two types": {**a_property({"$ref": "#"}), "type": ["object", "null"]},
    "no type": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "by a pattern": {
        **a_property(TEXT),
        "required": ["x"],
        "patternProperties": {"x": TEXT},
        "additionalProperties": {"$ref": "#"},
    },
    "enough items": {
        "type": "array",
        "prefixItems": [TEXT],
        "minItems": 1,
        "items": {"$ref": "#"},
    },
    "data": {"const": {"$ref": "#"}},
    "remote": {"$ref": "https://example.com/schema"},
    "missing": a_property({"$ref": "#/$defs/%C3%A4"}),
    "named oddly": a_property({"$ref": "#/$defs/a~1b%20c"}, **{"$defs": {"a/b c": TEXT}}),
    "multiples": {"prefixItems": [{"multipleOf": step} for step in (0.01, 5, 60, 1000)]},
    "joined": laughs(8),
    "large numbers": {"enum": [-(2**63) + 1024, 2**63, 2**64, 1e308]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_costs_too_much_or_never_ends_is_refused(name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(SchemaError, match=reason.replace("$", r"\$")) as caught:
        check_schemas([("tools[0]", TREE), ("response_format", schema)])
    assert caught.value.field == "response_format"


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_left_to_the_library(name: str) -> None:
    check_schemas([("response_format", FOLLOWED[name])])


def test_what_is_counted_is_counted_together() -> None:
    half = {"properties": {f"p{n}": {} for n in range(1_500)}}
    check_schemas([("tools[0]", half)])
    with pytest.raises(
        SchemaError, match="properties of the request's schemas are 3,000"
    ) as caught:
        check_schemas([("tools[0]", half), ("tools[1]", half)])
    assert caught.value.field == "tools[1]"


# --- an answer ends where there is a value ----------------------------------------------------
NAMES = ["a", "b", "c"]
REFERENCES = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES])


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    some = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        st.builds(lambda parts: {"anyOf": parts}, some),
        st.builds(
            lambda one, needed: {
                "type": "object",
                "properties": {"x": one},
                "required": ["x"] * needed,
            },
            inner,
            st.booleans(),
        ),
        st.builds(
            lambda one, least: {"type": "array", "items": one, "minItems": least},
            inner,
            st.integers(0, 1),
        ),
    )


SCHEMAS = st.recursive(st.one_of(REFERENCES, REFERENCES, st.just({"type": "null"})), _schemas)


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, SCHEMAS)))
def test_a_schema_is_refused_exactly_where_it_has_no_value(definitions: dict[str, Any]) -> None:
    schema = {"$ref": "#/$defs/a", "$defs": definitions}
    value = _value(schema, definitions, len(NAMES))
    if value is _NONE:
        with pytest.raises(SchemaError, match="asks for itself"):
            check_schemas([("response_format", schema)])
    else:
        check_schemas([("response_format", schema)])


_NONE: Any = object()


def _value(schema: Any, definitions: dict[str, Any], references: int) -> Any:
    """A value, found by following so many references at most: a smallest one repeats none."""
    if "$ref" in schema:
        if not references:
            return _NONE
        return _value(definitions[schema["$ref"][-1]], definitions, references - 1)
    if "anyOf" in schema:
        found = (_value(part, definitions, references) for part in schema["anyOf"])
        return next((value for value in found if value is not _NONE), _NONE)
    if schema["type"] == "object":
        inside = {key: _value(schema["properties"][key], definitions, references)
                  for key in schema["required"]}  # fmt: skip
        return _NONE if _NONE in inside.values() else inside
    if schema["type"] == "array":
        items = [_value(schema["items"], definitions, references)] * schema["minItems"]
        return _NONE if _NONE in items else items
    return None


# --- what reads like a call -----------------------------------------------------------------
ACTION = {"type": "object", "properties": {"name": TEXT, "arguments": {"type": "object"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ACTION, True),
        ({"anyOf": [TEXT, {"$ref": "#/$defs/a"}], "$defs": {"a": ACTION}}, True),
        ({"type": "array", "items": ACTION}, True),
        ({"properties": {"name": {"enum": ["add", "x"]}, "arguments": {}}}, True),
        ({"properties": {"name": {"enum": ["x"]}, "arguments": {}}}, False),
        ({"properties": {"name": {"const": "x"}, "arguments": {}}}, False),
        ({"properties": {"name": TEXT, "arguments": TEXT}}, False),
        ({"properties": {"name": {"type": "integer"}, "arguments": {}}}, False),
        (a_property(ACTION), False),
        ({"type": "object"}, False),
        (TREE, False),
    ],
)
def test_what_may_be_taken_for_a_call(schema: dict[str, Any], expected: bool) -> None:
    assert may_be_call(schema, "arguments", {"add"}) is expected
    assert may_be_call(schema, "parameters", {"add"}) is False
