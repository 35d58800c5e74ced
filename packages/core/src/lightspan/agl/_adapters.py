"""Adapters: spans as what one learns from, chat messages or triplets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypedDict, TypeVar

from lightspan.agl._attributes import nested
from lightspan.agl._rollouts import Triplet
from lightspan.agl._spans import Span
from lightspan.errors import AppError

F = TypeVar("F")
T = TypeVar("T")


class Adapter(Generic[F, T]):
    """Makes one thing of another: override `adapt`. It is callable, too."""

    def __call__(self, source: F, /) -> T:
        return self.adapt(source)

    def adapt(self, source: F, /) -> T:
        """What the source becomes.

        Raises:
            AppError: a subclass does not override it.
        """
        raise AppError(f"{type(self).__qualname__} must define adapt(self, source)")


class OtelTraceAdapter(Adapter[Sequence[Any], T], Generic[T]):
    """Of spans of OpenTelemetry's SDK."""


class TraceAdapter(Adapter[Sequence[Span], T], Generic[T]):
    """Of spans as a store keeps them."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """Of spans to triplets."""


class OpenAIMessages(TypedDict):
    """A conversation, as OpenAI's fine-tuning takes it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class TraceToMessages(TraceAdapter[list[OpenAIMessages]]):
    """Each model call as the conversation that it ends."""

    def adapt(self, source: Sequence[Span], /) -> list[OpenAIMessages]:
        """The conversations, in the order of the spans.

        Raises:
            DataError: attributes below `gen_ai.prompt` or `gen_ai.completion` are malformed.
        """
        children: dict[str | None, list[Span]] = {}
        for span in source:
            children.setdefault(span.parent_id, []).append(span)
        return [
            _conversation(span, children.get(span.span_id, ()))
            for span in source
            if any(_below(span, name) for name in ("prompt", "completion", "request", "response"))
        ]


def _below(span: Span, name: str) -> Any:
    return nested(span.attributes, f"gen_ai.{name}")


def _conversation(span: Span, children: Iterable[Span]) -> OpenAIMessages:
    messages = [_asked(message) for message in _below(span, "prompt") or ()]
    tools = [tool for child in children if (tool := nested(child.attributes, "tool"))]
    for answer in _below(span, "completion") or ():
        if answer.get("role") == "assistant":
            calls = [_tool_call(tool) for tool in tools] or _own_calls(answer)
            message = {"role": "assistant", "content": answer.get("content")}
            messages.append({**message, "tool_calls": calls} if calls else message)
    request = _below(span, "request")
    functions = request.get("functions") if isinstance(request, dict) else None
    return {"messages": messages, "tools": [_tool(f) for f in functions] if functions else None}


def _asked(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "assistant" and "tool_calls" in message:
        return {"role": "assistant", "content": None, "tool_calls": _own_calls(message)}
    said = {"role": message["role"], "content": message.get("content", "")}
    if message["role"] == "tool":
        said["tool_call_id"] = message.get("tool_call_id")
    return said


def _own_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The tool calls that a message itself says."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in message.get("tool_calls", ())
    ]


def _tool_call(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool call that a span of its own says."""
    function = {"name": tool["name"], "arguments": tool["parameters"]}
    return {"id": tool["call"]["id"], "type": tool["call"]["type"], "function": function}


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function["parameters"]
    told = {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": json.loads(parameters) if isinstance(parameters, str) else parameters,
    }
    return {"type": "function", "function": told}
