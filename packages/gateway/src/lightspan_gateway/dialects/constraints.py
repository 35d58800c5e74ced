"""Response formats and tool choices, which constrain an answer. Nothing here does I/O.

An app relies on these constraints. So a constraint that cannot be honoured is refused with an
error, in training and in validation; no constraint is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
"""Request fields that constrain the answer, of all known APIs and servers.

If the request's dialect does not support such a field, the request is refused in every mode.
"""
_ANY_OBJECT: Final[Schema] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the answer may call."""

    name: str
    parameters: Schema = field(default_factory=lambda: _ANY_OBJECT)
    strict: bool = False


Calls = Literal["auto", "required"]
_CALLS: Final = ("auto", "required")
RequestField = tuple[str, Any]
"""Name and value of a field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The form that an answer must have.

    Args:
        source: name and value of the request field that sets the constraint, for error messages.
        format: JSON schema of the text; None for any text.
        tools: tools that the answer may call; empty if it may call none.
        calls: "required" if the answer must consist of tool calls; "auto" if it may also be text.
        parallel: whether the answer may have several tool calls.
    """

    source: RequestField = ("", None)
    format: Schema | None = None
    tools: tuple[Tool, ...] = ()
    calls: Calls = "auto"
    parallel: bool = True


def read_tools(
    body: Mapping[str, Any],
    tools: list[dict[str, Any]] | None,
    format: RequestField,
    tool_choice: tuple[Any, RequestField | None] | None = None,
) -> dict[str, Any]:
    """Return the fields `tools`, `constraint` and `parse_tools` of a `MessagesRequest`.

    Args:
        body: the request.
        tools: the request's tools in the form of chat completions; None if it has none.
        format: name and value of the response format's field; the value is as in the Responses API.
        tool_choice: the value of `tool_choice` as in chat completions, and the field that forbids
            several calls (None if they are allowed). None to read both from `body`, which is then
            in OpenAI's format.

    Raises:
        ApiError: 400 naming the field that is invalid or cannot be honoured.
    """
    choice, one_call = tool_choice or (body.get("tool_choice"), _one_call(body))
    return {
        "tools": tools,
        "constraint": _constraint(format, tools, choice, one_call),
        "parse_tools": tools is not None and choice != "none",
    }


def _one_call(body: Mapping[str, Any]) -> RequestField | None:
    field = "parallel_tool_calls"
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"'{field}' must be true or false, not {value!r}", field)
    return (field, False) if value is False else None


def _constraint(
    format: RequestField,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Any,
    one_call: RequestField | None,
) -> Constraint | None:
    """Return the constraint of a request; None if any answer is valid.

    Args:
        format: name and value of the response format's field.
        tools: the request's tools in the form of chat completions; None if it has none.
        choice: value of `tool_choice`.
        one_call: name and value of the field that forbids several calls; None if they are allowed.
    """
    schema = _format(*format)
    offered = _tools(tools or ())
    names, calls = _choice(choice, {tool.name for tool in offered})
    if names is not None:
        offered = [tool for tool in offered if tool.name in names]
    if choice == "none" or not offered:
        return None if schema is None else Constraint(source=format, format=schema)
    sources: list[tuple[bool, RequestField | None]] = [
        (schema is not None, format),
        (calls == "required" or names is not None, ("tool_choice", choice)),
        (True, one_call),
        (any(tool.strict for tool in offered), ("tools", tools)),
    ]
    source = next((field for constrains, field in sources if constrains and field), None)
    if source is None:
        return None
    return Constraint(
        source=source,
        format=schema,
        # the parameters of a tool that is not strict only guide the model, unless a call is forced
        tools=tuple(
            tool if tool.strict or calls == "required" else Tool(name=tool.name) for tool in offered
        ),
        calls=calls,
        parallel=one_call is None and not _forces_one(choice),
    )


def _format(field: str, value: Any) -> Schema | None:
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind == "text" or (kind is None and not value):
        return None
    if kind == "json_object" and "schema" in value:
        raise bad_request(f"'{field}' of type json_object takes no schema: use json_schema", field)
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


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    parsed = []
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
        # as in OpenAI's API, a function without parameters takes no arguments
        schema = parameters or {"type": "object", "properties": {}}
        parsed.append(Tool(name=function["name"], parameters=schema, strict=strict is True))
    return parsed


def _choice(choice: Any, names: set[str]) -> tuple[set[str] | None, Calls]:
    """Return the names of the tools that the answer may call, and whether it must call one.

    The names are None if all tools are allowed.

    Args:
        choice: value of `tool_choice`.
        names: names of all tools of the request.

    Raises:
        ApiError: 400 if `choice` is malformed, or names a tool that the request does not have.
    """
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
        if not isinstance(allowed, Mapping) or allowed.get("mode", "auto") not in _CALLS:
            raise bad_request(f"'tool_choice' = {choice!r} is not understood", "tool_choice")
        listed = allowed.get("tools")
        chosen = {_name(tool) for tool in (listed if isinstance(listed, list) else ())}
        calls: Calls = "required" if allowed.get("mode") == "required" else "auto"
    else:
        chosen, calls = {_name(choice)}, "required"
    if not chosen or not chosen <= names:
        raise _no_tool(choice, names)
    return {name for name in chosen if name is not None}, calls


def _forces_one(choice: Any) -> bool:
    """Return whether `choice` names one function; OpenAI's models then call it exactly once."""
    return isinstance(choice, Mapping) and choice.get("type") != "allowed_tools"


def _name(choice: Any) -> str | None:
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
