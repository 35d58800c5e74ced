"""Model clients that do not use the OpenAI SDK: their calls are recorded, without tokens.

See `lightspan.bypassing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResultMessage,
    SystemMessage,
)

from lightspan import scope
from lightspan.bypassing import bypassing_call
from lightspan.emit import exception_attributes, text_of
from lightspan.records import CallOutcome
from lightspan.scope import Acting
from lightspan.spans import SpanStatus, now_ns


@dataclass(slots=True, eq=False)
class Ask:
    """One call of a model client's `create` or `create_stream`."""

    acting: Acting
    client: Any
    messages: Iterable[Any]
    tools: Iterable[Any] = ()
    outer: Ask | None = None
    """The call of a client that wraps this one."""
    is_seen: bool = False
    """Whether somebody records it: the wire shim, or a client inside."""
    start_ns: int = field(default_factory=now_ns)

    def seen(self) -> None:
        """Somebody records it, and so the calls around it."""
        ask: Ask | None = self
        while ask is not None:
            ask.is_seen, ask = True, ask.outer


asking: Final[ContextVar[Ask | None]] = ContextVar("lightspan_autogen_asking", default=None)
"""The client's call that is under way in this context."""


def notice(acting: Acting) -> None:
    """A resolver that resolves nothing: who asks for the acting agent records the call."""
    ask = asking.get()
    if ask is not None:
        ask.seen()


def begin(client: Any, args: Any, kwargs: Mapping[str, Any]) -> Ask | None:
    """The call that begins; None outside a scope."""
    outer, acting = asking.get(), scope.acting()
    if acting is None or not acting.scope.recorder.keeps:
        return None
    messages = kwargs["messages"] if "messages" in kwargs else args[0]
    return Ask(acting, client, list(messages), list(kwargs.get("tools", ())), outer)


def end(ask: Ask, result: Any, error: BaseException | None) -> None:
    """Record the call, unless it was seen."""
    if ask.is_seen:
        return
    ask.seen()
    is_left = isinstance(error, GeneratorExit | asyncio.CancelledError)
    span = bypassing_call(
        ask.acting,
        _request(ask),
        _answer(result) if isinstance(result, CreateResult) else {},
        start_ns=ask.start_ns,
        status=SpanStatus.OK if error is None else SpanStatus.ERROR,
        message="" if error is None else text_of(error) or "error",
        attributes={} if error is None else exception_attributes(error),
        outcome=CallOutcome.CANCELLED if is_left else None,
    )
    ask.acting.scope.recorder.add(span)


def guarded(note: Callable[..., Any], acting: Acting | None, *values: Any) -> Any:
    """Note something; an error of ours damages the attempt and never reaches the app."""
    try:
        return note(*values)
    except Exception as error:
        if acting is not None:
            reason = f"lightspan_autogen: {type(error).__name__}: {error}"
            acting.scope.recorder.damage(reason)
        return None


def _model(client: Any) -> str:
    """The model's name, where the client keeps it, else the kind of client."""
    for name in ("_model_name", "_model", "model"):
        if isinstance(getattr(client, name, None), str):
            return str(getattr(client, name))
    arguments = getattr(client, "_create_args", None)
    if isinstance(arguments, Mapping) and isinstance(arguments.get("model"), str):
        return str(arguments["model"])
    return type(client).__name__


def _request(ask: Ask) -> dict[str, Any]:
    """The call as a chat request."""
    request: dict[str, Any] = {
        "model": _model(ask.client),
        "messages": [message for given in ask.messages for message in _messages(given)],
    }
    tools = [{"type": "function", "function": _schema(tool)} for tool in ask.tools]
    return {**request, **({"tools": tools} if tools else {})}


def _schema(tool: Any) -> Any:
    return tool if isinstance(tool, Mapping) else tool.schema


def _messages(message: Any) -> list[dict[str, Any]]:
    if isinstance(message, FunctionExecutionResultMessage):
        return [
            {"role": "tool", "tool_call_id": result.call_id, "content": result.content}
            for result in message.content
        ]
    if isinstance(message, AssistantMessage):
        return [_assistant(message.content)]
    role = "system" if isinstance(message, SystemMessage) else "user"
    return [{"role": role, "content": _content(message.content)}]


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part if isinstance(part, str) else f"<{type(part).__name__}>"}
        for part in content
    ]


def _assistant(content: Any) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in content
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _answer(result: CreateResult) -> dict[str, Any]:
    """The result as a chat completion."""
    reason = "tool_calls" if result.finish_reason == "function_calls" else result.finish_reason
    choice = {"message": _assistant(result.content), "finish_reason": reason}
    usage = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
    }
    return {"choices": [choice], "usage": usage}
