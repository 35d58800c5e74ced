"""The grammar of what a request allows, in llguidance's syntax and the model family's format.

    hermes   <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, each on lines of its own
    llama    {"name": …, "parameters": {…}}, several with "; " between them
    json     {"name": …, "arguments": {…}}, or an array of these

The same formats that `lightspan.gateway.tools` reads. A grammar does not depend on the tokenizer:
it refers to rules for the marks of a call, which `lightspan.engines.grammars` adds as the tokenizer
has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from lightspan.engines.protocol import ToolParserName
from lightspan.gateway.dialects.constraints import Constraint, Schema, Tool
from lightspan.gateway.schemas import closed, may_be_call, moved, without_id
from lightspan.schema.messages import CALL_OPEN, PYTHON_TAG

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
_SPACE: Final = r"[\s\x1c-\x1f]"
"""As Python strips it, which the parsers do."""
_BEGINNINGS: Final[Mapping[ToolParserName, str]] = {
    "llama": rf"\{{|{re.escape(PYTHON_TAG)}",
    "json": r"\{|\[|```",
}
"""What a call begins with, and so no text."""


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
    text = rf"{_ANY_TEXT} & ~/{_SPACE}*({_BEGINNINGS[parser]})(?s:.*)/"
    return _rules(start="TEXT? | calls", TEXT=text, **calls)


def parts_of(constraint: Constraint, parser: ToolParserName) -> Iterator[tuple[str, str]]:
    """Each part of the constraint by itself: (the request's field, its grammar)."""
    if constraint.format is not None:
        yield constraint.format.field, grammar_of(Constraint(format=constraint.format), parser)
    for tool in constraint.tools:
        alone = Constraint(tools=(tool,), calls="required", parallel=False)
        yield tool.field, grammar_of(alone, parser)


def schemas_of(constraint: Constraint) -> Iterator[tuple[str, Schema]]:
    """Each schema of the constraint as the request has it: (the request's field, the schema)."""
    if constraint.format is not None:
        yield constraint.format.field, constraint.format.schema
    for tool in constraint.tools:
        yield tool.field, tool.parameters


def is_ambiguous(constraint: Constraint, parser: ToolParserName) -> bool:
    """Whether an answer in the format could be read as a call; where calls have marks none can."""
    if constraint.format is None or constraint.calls == "required" or parser == "hermes":
        return False
    names = {tool.name for tool in constraint.tools}
    return bool(names) and may_be_call(constraint.format.schema, _ARGUMENTS[parser], names)


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
        definitions[name] = moved(closed(without_id(tool.parameters)), f"#/$defs/{name}")
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


# --- text -----------------------------------------------------------------------------------
def _json(schema: Schema) -> str:
    document = {**closed(schema), "x-guidance": _LAYOUT}
    # an object in braces: `%json` reads to the closing one
    return "%json " + msgspec.json.encode(document).decode()


def _rules(**rules: str) -> str:
    return "".join(f"{name}: {body}\n" for name, body in rules.items())
