"""Tools of the Responses API: which are offered to the model, under which names. No I/O.

A function stays a function. A custom tool, whose input is a text, is offered as a function with the
argument `input`. The tools of a namespace are offered as `namespace.name`. A tool that OpenAI's own
servers run, such as `web_search`, is left out of the offer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from lightspan.schema.openai_responses import chat_name, chat_tool
from lightspan_gateway.api_errors import bad_request

TOOLS: Final = "tools."
"""Beginning of the names of overrides that concern a tool."""
_SERVED: Final = frozenset(
    {
        *("web_search", "web_search_preview", "file_search", "code_interpreter"),
        *("image_generation", "mcp", "tool_search"),
    }
)
"""Types of tools that OpenAI's servers run. `tool_search` finds tools for its models alone, so the
tools that the request has are all offered without it."""
_DATED: Final = ("web_search_",)
"""Beginnings of further such types, which end with a date."""
_TEXT: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of the function that stands for a custom tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """The tools that a request offers to the model."""

    tools: list[dict[str, Any]] | None
    """Tools in the form of chat completions; None if the request offers none."""
    origins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of an offered function → `type`, `name` and `namespace` of the request's tool. A plain
    function has no entry."""
    overrides: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Fields for the report. `tools.NAME` → (type of the tool, None) for a tool that is left out,
    without the rest, which may hold a key. `tools.NAME.format` → (grammar, where the model sees it)
    for the grammar of a custom tool, which is not enforced."""

    def call_item(self, call: Mapping[str, Any], item_id: str) -> dict[str, Any]:
        """Return the item of a tool call in an answer.

        Args:
            call: the call in the form of chat completions.
            item_id: id of the item, without the prefix of its type.
        """
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        origin = self.origins.get(name, {})
        item = {"call_id": call["id"], "name": origin.get("name", name), "status": "completed"}
        if "namespace" in origin:
            item["namespace"] = origin["namespace"]
        if origin.get("type") == "custom":
            content = {"type": "custom_tool_call", "input": _input(arguments)}
            return {"id": f"ctc_{item_id}", **content, **item}
        return {"id": f"fc_{item_id}", "type": "function_call", **item, "arguments": arguments}


def _input(arguments: str) -> str:
    """Return the text that a call passes to a custom tool.

    If the call has other arguments than `input`, the text is all of them, as JSON: the program
    refuses it, and the model reads why.
    """
    try:
        values = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    is_input = isinstance(values, dict) and values.keys() == {"input"}
    return values["input"] if is_input and isinstance(values["input"], str) else arguments


def read_offer(tools: Sequence[Any] | None) -> ToolOffer:
    """Return what a request's `tools` offer to the model.

    Raises:
        ApiError: 400 naming the tool that is malformed, or of an unsupported type.
    """
    if not tools:
        return ToolOffer(tools=None)
    offered: list[dict[str, Any]] = []
    origins: dict[str, Mapping[str, Any]] = {}
    overrides: dict[str, tuple[Any, Any]] = {}
    for where, namespace, tool in _entries(tools):
        fields = tool if isinstance(tool, Mapping) else {}
        kind = fields.get("type", tool)
        if fields and (str(kind) in _SERVED or str(kind).startswith(_DATED)):
            named = {key: fields[key] for key in ("type", "server_label") if key in fields}
            overrides[f"{TOOLS}{fields.get('server_label') or kind}"] = (named, None)
            continue
        if kind not in ("function", "custom") or not isinstance(fields.get("name"), str):
            raise bad_request(
                f"{where} is of type {kind!r}: only functions and custom tools with a name are "
                "supported, and namespaces of them",
                where,
            )
        origin = {"type": kind, "name": fields["name"]}
        origin |= {"namespace": namespace} if namespace else {}
        name = chat_name(origin)
        if kind == "custom":
            fields, grammar = _function(fields)
            if grammar:
                overrides[f"{TOOLS}{name}.format"] = (grammar, "in its description")
        offered.append(chat_tool({**fields, "name": name}))
        if kind == "custom" or namespace:
            origins[name] = origin
    return ToolOffer(tools=offered or None, origins=origins, overrides=overrides)


def _entries(tools: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the namespace ("" for none) and the fields of each tool."""
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not (isinstance(tool, Mapping) and tool.get("type") == "namespace"):
            yield where, "", tool
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name or not isinstance(inner, list):
            raise bad_request(
                f"{where} is a namespace: it needs a name and an array 'tools'", where
            )
        for place, each in enumerate(inner):
            yield f"{where}.tools[{place}]", name, each


def _function(tool: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the function that stands for a custom tool, and the grammar of its input.

    The grammar becomes part of the description, because an input inside of JSON cannot be sampled
    under it. It is empty if the tool accepts any text.
    """
    form = tool.get("format")
    form = form if isinstance(form, Mapping) else {}
    inner = form.get("grammar")  # as in chat completions
    inner = inner if isinstance(inner, Mapping) else form
    grammar = str(inner.get("definition") or "")
    parts = [str(tool.get("description") or "")]
    if grammar:
        syntax = inner.get("syntax") or "given"
        parts.append(f"The input must match this grammar ({syntax}):\n{grammar}")
    description = "\n\n".join(filter(None, parts)) or None
    return {**tool, "description": description, "parameters": _TEXT}, grammar
