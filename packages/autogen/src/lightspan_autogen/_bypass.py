"""Model clients that do not use the OpenAI SDK: their calls are recorded, without tokens.

Those that bypass it: see `lightspan.capture.other_clients`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from autogen_core import Image
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResultMessage,
    SystemMessage,
)

from lightspan.instrumentation import (
    AgentContext,
    CallEnd,
    NestedCalls,
    SpanEnd,
    add_capture_error,
    notify_call_start,
    record_call,
    resolve_agent,
)


@dataclass(slots=True, eq=False)
class Ask:
    """One call of a model client's `create` or `create_stream`."""

    acting: AgentContext
    """Who asks."""
    around: AgentContext
    """Who asks by the pushed frames alone."""
    client: Any
    messages: Iterable[Any]
    tools: Iterable[Any]
    told: CallEnd
    """See `notify_call_start`."""
    inside: NestedCalls = field(default_factory=NestedCalls)
    """That somebody records: the wire shim, or a client inside."""
    start_ns: int = field(default_factory=time.time_ns)

    @property
    def acting_inside(self) -> AgentContext:
        """Who acts in the call."""
        return self.around.noting(NAME, self)

    @property
    def is_uncached(self) -> bool:
        """Whether the client is AutoGen's cache, which must not answer a call that `is_routed`."""
        return self.is_cache and self.acting.is_routed

    @property
    def is_cache(self) -> bool:
        """Whether the client is AutoGen's cache."""
        module = sys.modules.get("autogen_ext.models.cache")
        return module is not None and isinstance(self.client, module.ChatCompletionCache)


NAME: Final = "lightspan_autogen"
"""Of the adapter: its note is the client's call that is under way in a context."""


def note_call(acting: AgentContext) -> CallEnd | None:
    """Somebody records the call of the client that is under way (`add_call_listener`)."""
    ask: Ask | None = acting.notes.get(NAME)
    return None if ask is None else ask.inside.start()


def begin(around: AgentContext, client: Any, args: Any, kwargs: Mapping[str, Any]) -> Ask | None:
    """The call that begins; None where nothing is recorded."""
    acting = resolve_agent(around)
    told = notify_call_start(acting)
    if not acting.scope.recorder.keeps:
        return None
    messages = kwargs["messages"] if "messages" in kwargs else args[0]
    return Ask(acting, around, client, list(messages), list(kwargs.get("tools", ())), told)


def end(ask: Ask, result: Any, error: BaseException | None) -> None:
    """Record the call, unless somebody else did."""
    ask.told(error is None or isinstance(error, GeneratorExit))
    if not ask.inside.needs_record(is_ok=error is None):
        return
    record_call(
        ask.acting,
        _request(ask),
        _answer(result) if isinstance(result, CreateResult) else {},
        SpanEnd() if error is None else SpanEnd.from_error(error),
        start_ns=ask.start_ns,
        client=None if ask.is_cache else ask.client,
        native="autogen_ext.models.openai.OpenAIChatCompletionClient",
    )


def guarded(note: Callable[..., Any], acting: AgentContext, *values: Any) -> Any:
    """Note something; an error of ours damages the attempt and never reaches the app."""
    try:
        return note(*values)
    except Exception as error:
        add_capture_error(acting.scope.recorder, NAME, error)
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
    return [_part(part) for part in content]


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.data_uri}}
    return {"type": "text", "text": part if isinstance(part, str) else f"<{type(part).__name__}>"}


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
