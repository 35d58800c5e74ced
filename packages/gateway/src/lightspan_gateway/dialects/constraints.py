"""What a request constrains: the response format, and how tools may be called. Pure.

A constraint is part of the app: it is honoured or refused in every mode, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from lightspan_gateway.api_errors import bad_request

Schema = Mapping[str, Any]

CONSTRAINING: Final = frozenset(
    {
        *("functions", "function_call", "grammar", "json_schema", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("regex", "ebnf", "structural_tag", "format", "allowed_token_ids", "bad_words"),
        *("response_format", "tools", "tool_choice"),
    }
)
"""Fields of any server or API version that constrain the answer; unsupported, they are refused."""
_ANY_OBJECT: Final[Schema] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that may be called."""

    name: str
    parameters: Schema


Calls = Literal["auto", "required"]
Asked = tuple[str, Any]
"""(field, value) that ask for a constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What an answer must be.

    Args:
        asked: the field that asks for it, and its value.
        format: the schema of a text that is JSON; None for any text.
        tools: those that may be called; none if no call is looked for.
        calls: "required": the answer is nothing but calls.
        parallel: several calls may stand in one answer.
    """

    asked: Asked = ("", None)
    format: Schema | None = None
    tools: tuple[Tool, ...] = ()
    calls: Calls = "auto"
    parallel: bool = True


def constraint_of(
    *,
    format: Asked,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Any,
    one_call: Asked | None,
) -> Constraint | None:
    """Return what a request constrains; None if an answer may be anything.

    Args:
        format: the name and value of the field that asks for a format, `schema` and all in one
            object, as the Responses API has it.
        tools: as chat has them.
        choice: the value of `tool_choice`.
        one_call: the field that asks for one call at most; None if none does.

    Raises:
        ApiError: 400 naming the field.
    """
    wanted = _format(*format)
    called = _tools(tools or ())
    names, calls = _choice(choice, {tool.name for tool, _ in called})
    if names is not None:
        called = [(tool, strict) for tool, strict in called if tool.name in names]
    if choice == "none" or not called:
        return None if wanted is None else Constraint(asked=format, format=wanted)
    asking: list[tuple[bool, Asked | None]] = [
        (wanted is not None, format),
        (calls == "required" or names is not None, ("tool_choice", choice)),
        (True, one_call),
        (any(strict for _, strict in called), ("tools", tools)),
    ]
    fields = [field for asks, field in asking if asks and field is not None]
    if not fields:
        return None
    # the parameters of a tool that is not strict only guide the model, unless a call is forced
    offered = tuple(
        tool if is_strict or calls == "required" else _loose(tool) for tool, is_strict in called
    )
    return Constraint(
        asked=fields[0],
        format=wanted,
        tools=offered,
        calls=calls,
        parallel=one_call is None and not _forces_one(choice),
    )


def one_call_of(body: Mapping[str, Any]) -> Asked | None:
    """Return the field of an OpenAI request that asks for at most one call."""
    field = "parallel_tool_calls"
    asked = body.get(field)
    if asked is not None and not isinstance(asked, bool):
        raise bad_request(f"'{field}' must be true or false, not {asked!r}", field)
    return (field, False) if asked is False else None


def _loose(tool: Tool) -> Tool:
    return Tool(name=tool.name, parameters=_ANY_OBJECT)


def _format(field: str, value: Any) -> Schema | None:
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind == "text" or (kind is None and not value):
        return None
    if kind == "json_object" and "schema" in value:
        raise bad_request(
            f"'{field}' of type json_object takes no schema: ask for json_schema", field
        )
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema":
        raise bad_request(
            f"'{field}' has the type {kind!r}: there are text, json_object and json_schema", field
        )
    schema = value.get("schema")
    if not isinstance(schema, Mapping):
        raise bad_request(f"'{field}' of type json_schema needs a schema, an object", field)
    return schema


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[tuple[Tool, bool]]:
    """Return each tool, and whether it is strict."""
    read = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where} is not a function with a name", where)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise bad_request(f"the parameters of {where} must be an object", where)
        strict = function.get("strict")
        if tool.get("strict") is not None or not isinstance(strict, bool | None):
            raise bad_request(f"'{where}.function.strict' must be true or false", where)
        # OpenAI's: a function without parameters takes none
        schema = parameters or {"type": "object", "properties": {}}
        read.append((Tool(name=function["name"], parameters=schema), strict is True))
    return read


def _choice(choice: Any, names: set[str]) -> tuple[set[str] | None, Calls]:
    """Return (the tools that may be called, None: all; whether a call is required)."""
    if choice in (None, "auto", "none"):
        return None, "auto"
    if choice in ("required", "any"):
        if not names:
            raise _no_tool(choice, names)
        return None, "required"
    if not isinstance(choice, Mapping):
        raise bad_request(f"'tool_choice' = {choice!r} is not understood", "tool_choice")
    if not _forces_one(choice):
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, Mapping) or allowed.get("mode", "auto") not in _MODES:
            raise bad_request(f"'tool_choice' = {choice!r} is not understood", "tool_choice")
        listed = allowed.get("tools")
        chosen = {_named(tool) for tool in (listed if isinstance(listed, list) else ())}
        calls: Calls = "required" if allowed.get("mode") == "required" else "auto"
    else:
        chosen, calls = {_named(choice)}, "required"
    if not chosen or not chosen <= names:
        raise _no_tool(choice, names)
    return {name for name in chosen if name is not None}, calls


_MODES: Final = ("auto", "required")


def _forces_one(choice: Any) -> bool:
    """Return whether it names one function, which OpenAI calls exactly once."""
    return isinstance(choice, Mapping) and choice.get("type") != "allowed_tools"


def _named(choice: Any) -> str | None:
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _no_tool(choice: Any, names: set[str]) -> Exception:
    there = ", ".join(sorted(names)) or "none"
    return bad_request(
        f"'tool_choice' = {choice!r} names no tool; there are: {there}", "tool_choice"
    )
