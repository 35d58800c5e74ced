"""Record model calls of AutoGen whose client does not use the OpenAI SDK.

Their records have no tokens. See `lightspan.capture.other_clients`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from autogen_core import Image
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResultMessage,
    SystemMessage,
)

from lightspan.instrumentation import (
    Adapter,
    AgentContext,
    FrameworkCall,
    SpanEnd,
    current_agent,
    record_call,
)


@dataclass(slots=True, eq=False)
class ModelCall:
    """One call of a model client's `create` or `create_stream`."""

    context: AgentContext
    """Context in which the calling agent acts."""
    pushed: AgentContext
    """Context with the frames that `lightspan.agent` has pushed, before the adapters' resolvers add
    their own.
    """
    client: Any
    messages: Iterable[Any]
    tools: Iterable[Any]
    call: FrameworkCall
    start_ns: int = field(default_factory=time.time_ns)
    has_ended: bool = False

    @property
    def key(self) -> str:
        """Key by which the attempt's recorder holds the call while it is open."""
        return f"{adapter.name} {id(self)}"

    @property
    def inside(self) -> AgentContext:
        """Context of everything that happens during the call."""
        return self.pushed.with_note(adapter.name, self)

    @property
    def bypasses_cache(self) -> bool:
        """Whether AutoGen's cache must not answer the call.

        It must not if the call is routed (`AgentContext.is_routed`): the cached answer may be from
        other weights or instructions.
        """
        return self.is_cache and self.context.is_routed

    @property
    def is_cache(self) -> bool:
        """Whether the client is AutoGen's `ChatCompletionCache`."""
        module = sys.modules.get("autogen_ext.models.cache")
        return module is not None and isinstance(self.client, module.ChatCompletionCache)


def _open_calls(context: AgentContext) -> list[FrameworkCall]:
    """Return the model call that is open in `context`, as a list of one; empty if none is open."""
    model_call: ModelCall | None = context.notes.get(adapter.name)
    return [] if model_call is None else [model_call.call]


adapter: Final = Adapter(
    "lightspan_autogen",
    ("autogen-core", "openinference.instrumentation.autogen_agentchat"),
    open_calls=_open_calls,
)
"""The adapter. Its note in a context is the `ModelCall` that is in progress."""


def begin(
    pushed: AgentContext, client: Any, args: Any, kwargs: Mapping[str, Any]
) -> ModelCall | None:
    """Begin a model call and return it; return None if the attempt records nothing.

    Args:
        pushed: the current context. It has the agents that `lightspan.agent` has set, and not yet
            those that AutoGen runs.
        client: the model client.
        args: positional arguments of the client's method.
        kwargs: keyword arguments of the client's method.
    """
    context = current_agent() or pushed
    call = adapter.start_call(context)
    if not context.scope.recorder.keeps:
        return None
    messages = list(kwargs["messages"] if "messages" in kwargs else args[0])
    model_call = ModelCall(context, pushed, client, messages, list(kwargs.get("tools", ())), call)
    give_up = partial(guarded, end, context, model_call, None, GeneratorExit())
    context.scope.recorder.register_pending(model_call.key, give_up)
    return model_call


def end(model_call: ModelCall, result: Any, error: BaseException | None) -> None:
    """End a model call, and record it if nothing else has recorded it. Only the first end counts.

    The client may make its request by an SDK that lightspan records itself.

    Args:
        model_call: the model call.
        result: the last value that the client returned or streamed; None if there is none.
        error: exception that ended the call; None if it succeeded.
    """
    if model_call.has_ended:
        return
    model_call.has_ended = True
    try:
        model_call.call.end(is_answered=error is None or isinstance(error, GeneratorExit))
        if model_call.call.needs_record(is_ok=error is None):
            _record(model_call, result, error)
    finally:  # after the span was added: the attempt may be complete now
        model_call.context.scope.recorder.resolve_pending(model_call.key)


def _record(model_call: ModelCall, result: Any, error: BaseException | None) -> None:
    record_call(
        model_call.context,
        _request(model_call),
        _answer(result) if isinstance(result, CreateResult) else {},
        SpanEnd() if error is None else SpanEnd.from_error(error),
        start_ns=model_call.start_ns,
        client=None if model_call.is_cache else model_call.client,
        native="autogen_ext.models.openai.OpenAIChatCompletionClient",
        is_cached=isinstance(result, CreateResult) and result.cached,
    )


def guarded(function: Callable[..., Any], context: AgentContext, *values: Any) -> Any:
    """Call `function`; if it raises, record a capture error of the attempt and return None.

    A capture error excludes the attempt from training.

    Args:
        function: the function.
        context: context of the attempt.
        values: arguments of `function`.
    """
    try:
        return function(*values)
    except Exception as error:
        adapter.add_capture_error(context.scope.recorder, error)
        return None


def _model(client: Any) -> str:
    """Return the model's name if the client stores it, else the name of the client's class."""
    for name in ("_model_name", "_model", "model"):
        if isinstance(getattr(client, name, None), str):
            return str(getattr(client, name))
    arguments = getattr(client, "_create_args", None)
    if isinstance(arguments, Mapping) and isinstance(arguments.get("model"), str):
        return str(arguments["model"])
    return type(client).__name__


def _request(model_call: ModelCall) -> dict[str, Any]:
    """Return the call as an OpenAI chat request."""
    request: dict[str, Any] = {
        "model": _model(model_call.client),
        "messages": [part for message in model_call.messages for part in _messages(message)],
    }
    tools = [{"type": "function", "function": _schema(tool)} for tool in model_call.tools]
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
    """Return the result as an OpenAI chat completion."""
    reason = "tool_calls" if result.finish_reason == "function_calls" else result.finish_reason
    choice = {"message": _assistant(result.content), "finish_reason": reason}
    usage = {
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
    }
    return {"choices": [choice], "usage": usage}
