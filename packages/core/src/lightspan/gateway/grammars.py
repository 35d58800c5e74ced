"""The grammar of what a request allows, in llguidance's syntax and the model family's format.

    hermes   <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, each on lines of its own
    llama    {"name": …, "parameters": {…}}, several with "; " between them
    json     {"name": …, "arguments": {…}}, or an array of these

The same formats that `lightspan.gateway.tools` reads. A grammar does not depend on the tokenizer:
it refers to rules for the marks of a call, which `lightspan.engines.grammars` adds as the tokenizer
has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from lightspan.engines.protocol import ToolParserName
from lightspan.gateway.dialects.constraints import Constraint, Schema, Tool
from lightspan.schema.messages import CALL_OPEN

LONGEST: Final = 2**18
"""Characters of a grammar."""

# Any amount of white space is valid JSON, and an untrained model may well write nothing else.
_LAYOUT: Final = {
    "whitespace_pattern": r"( |\n[ ]{0,16})?",
    "item_separator": ",",
    "key_separator": ":",
}
_ARGUMENTS: Final[Mapping[ToolParserName, str]] = {
    "hermes": "arguments",
    "llama": "parameters",
    "json": "arguments",
}
_ANY_TEXT: Final = "/(?s:.*)/"


def grammar_of(constraint: Constraint, parser: ToolParserName) -> str:
    """The grammar of an answer, for a model whose calls this parser reads."""
    if not constraint.tools:
        assert constraint.format is not None
        return _rules(start="answer", answer=_json(constraint.format.schema))
    calls = _CALLS[parser](constraint)
    if constraint.calls == "required":
        return _rules(start="calls", **calls)
    if constraint.format is not None:
        return _rules(start="answer | calls", answer=_json(constraint.format.schema), **calls)
    if parser == "hermes":  # text may stand before the first call
        more = r'("\n" call)*' if constraint.parallel else ""
        return _rules(
            start=f"TEXT? | text_and_tool_call_open rest {more}",
            TEXT=f"{_ANY_TEXT} & ~/(?s:.*){CALL_OPEN}(?s:.*)/",
            **calls,
        )
    # a text that begins like a call would be taken for one
    return _rules(start="TEXT? | calls", TEXT=r"/[^\s{\[`<](?s:.*)/", **calls)


def parts_of(constraint: Constraint, parser: ToolParserName) -> Iterator[tuple[str, str]]:
    """Each part of the constraint by itself: (the request's field, its grammar)."""
    if constraint.format is not None:
        yield constraint.format.field, grammar_of(Constraint(format=constraint.format), parser)
    for tool in constraint.tools:
        alone = Constraint(tools=(tool,), calls="required", parallel=False)
        yield tool.field, grammar_of(alone, parser)


# --- calls ----------------------------------------------------------------------------------
def _hermes(constraint: Constraint) -> dict[str, str]:
    rules = {
        "call": "tool_call_open rest",
        "rest": r'"\n" body "\n" tool_call_close',
        "body": _json(_one_of(constraint.tools, "arguments")),
    }
    return {"calls": r'call ("\n" call)*' if constraint.parallel else "call", **rules}


def _llama(constraint: Constraint) -> dict[str, str]:
    calls = 'call ("; " call)*' if constraint.parallel else "call"
    return {"calls": calls, "call": _json(_one_of(constraint.tools, "parameters"))}


def _bare_json(constraint: Constraint) -> dict[str, str]:
    one = _one_of(constraint.tools, "arguments")
    if not constraint.parallel:
        return {"calls": _json(one)}
    definitions = one.pop("$defs")
    several = {"type": "array", "items": one, "minItems": 1}
    return {"calls": _json({"anyOf": [one, several], "$defs": definitions})}


_CALLS: Final[Mapping[ToolParserName, Callable[[Constraint], dict[str, str]]]] = {
    "hermes": _hermes,
    "llama": _llama,
    "json": _bare_json,
}


def _one_of(tools: Iterable[Tool], arguments: str) -> dict[str, Any]:
    """The schema of a call of one of the tools, whose own schemas are its definitions: what they
    refer to would not be found inside another schema."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(tools):
        name = f"tool{number}"
        definitions[name] = _moved(closed(_without_id(tool.parameters)), f"#/$defs/{name}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    arguments: {"$ref": f"#/$defs/{name}"},
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


# --- schemas --------------------------------------------------------------------------------
_SCHEMA: Final = ("items", "additionalProperties", "contains", "not", "if", "then", "else")
_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_UNCLEAR: Final = frozenset({"not", "if", "then", "else", "dependentSchemas"})
"""Whose schemas hold beside others, or not at all."""
_IN_PLACE: Final = _UNCLEAR | {"anyOf", "oneOf", "allOf"}
"""Whose schemas are of the same value as the one that they stand in."""
_DESCRIBING: Final = _IN_PLACE | {
    *("properties", "required", "dependentRequired", "patternProperties"),
    *("additionalProperties", "unevaluatedProperties", "$ref"),
}
"""Keywords that say something of an object's properties."""
_OPEN: Final = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""Keywords that say which other properties there may be."""


def closed(schema: Any) -> Any:
    """The schema without properties that it does not name, where it leaves that open: whatever the
    model wrote there would be valid, at any length.

    Where several schemas describe one object (the parts of an `allOf`, properties beside an
    `anyOf`, a `$ref` beside either) none of them is closed: they do not name one another's.
    """
    shared: set[str] = set()
    while True:
        before = len(shared)
        result = _closed(schema, "#", shared, is_shared=False)
        if len(shared) == before:
            return result


def _closed(schema: Any, place: str, shared: set[str], *, is_shared: bool) -> Any:
    """One of its schemas, closed.

    Args:
        place: its JSON pointer.
        shared: pointers of schemas that are referred to beside others; more are added.
        is_shared: others describe the same value.
    """
    if not isinstance(schema, Mapping):
        return schema
    is_shared = is_shared or place in shared
    is_joined = is_shared or len(_DESCRIBING & schema.keys()) > 1
    if is_joined and isinstance(schema.get("$ref"), str):
        shared.add(schema["$ref"])

    def close(part: Any, key: str, step: str) -> Any:
        beside = is_joined or key in _UNCLEAR or (key == "allOf" and len(schema["allOf"]) > 1)
        return _closed(part, place + step, shared, is_shared=key in _IN_PLACE and beside)

    result = _mapped(schema, close)
    others = _OPEN | _IN_PLACE | {"$ref"}
    if "properties" in schema and not is_shared and not others & schema.keys():
        result["additionalProperties"] = False
    return result


def _moved(schema: Any, place: str) -> Any:
    """The schema for another document, in which it stands at this JSON pointer."""
    if not isinstance(schema, Mapping):
        return schema
    result = _mapped(schema, lambda part, key, step: _moved(part, place))
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        result["$ref"] = place + reference[1:]
    return result


def _without_id(schema: Schema) -> Schema:
    """A tool's schema without a name of its own, against which its references would be read."""
    name = schema.get("$id")
    if not isinstance(name, str) or f'"$ref":"{name}' in msgspec.json.encode(schema).decode():
        return schema
    return {key: value for key, value in schema.items() if key != "$id"}


def _mapped(schema: Schema, change: Callable[[Any, str, str], Any]) -> dict[str, Any]:
    """The schema with its direct subschemas changed; what is data, such as `enum`, stays.

    Args:
        change: what is made of a subschema, its keyword, and its JSON pointer from here.
    """
    result = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMAS and isinstance(value, list):
            result[key] = [change(part, key, f"/{key}/{n}") for n, part in enumerate(value)]
        elif key in _SCHEMA:
            result[key] = change(value, key, f"/{key}")
        elif key in _NAMED and isinstance(value, Mapping):
            result[key] = {
                name: change(part, key, f"/{key}/{_escaped(name)}") for name, part in value.items()
            }
    return result


def _escaped(name: str) -> str:
    """As a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


# --- text -----------------------------------------------------------------------------------
def _json(schema: Schema) -> str:
    document = {**closed(schema), "x-guidance": _LAYOUT}
    # an object in braces: `%json` reads to the closing one
    return "%json " + msgspec.json.encode(document).decode()


def _rules(**rules: str) -> str:
    return "".join(f"{name}: {body}\n" for name, body in rules.items())
