"""Model calls in LangChain whose client does not use the OpenAI SDK: recorded without tokens.

See `lightspan.capture.other_clients`. LangChain calls back when a model starts. If the SDK
instrumentation records a call before the model ends, that call is the model's; otherwise the client
bypassed the SDK, or LangChain's cache answered.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final
from uuid import UUID

from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage, convert_to_openai_messages

from lightspan.instrumentation import FrameworkCall, truncated_json


@dataclass(slots=True, eq=False)
class Run:
    """A model run."""

    prompt: Any
    """List of messages, or a text."""
    call: FrameworkCall
    around: Sequence[Run]
    """Model runs around it; several if it is inside one of them, but unknown which."""
    is_open: bool = True

    def end(self, *, is_answered: bool) -> None:
        """End the run."""
        self.is_open = False
        self.call.end(is_answered=is_answered)


@dataclass(slots=True, eq=False)
class ModelCall:
    """One call of a model: one run, or a run for each of several prompts (`generate`)."""

    size: int
    """Number of prompts."""
    runs: dict[UUID, Run] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    model: Any = None
    """The model; None if it is unknown."""
    around: Sequence[Run] = ()
    """Model runs around the call."""
    start_ns: int = field(default_factory=time.time_ns)

    @property
    def last_run(self) -> UUID | None:
        """Id of the run that began last."""
        return next(reversed(self.runs), None)


current_call: Final[ContextVar[ModelCall | None]] = ContextVar(
    "lightspan_langgraph_asking", default=None
)
"""The last model call that began in this context and has not answered yet.

It is not a note of `AgentContext`: a model run may end in another context than it began in, where a
note could not be removed, and the frames pushed with it would stay.
"""


def begin(
    run_id: UUID,
    prompt: Any,
    name: str,
    event: Mapping[str, Any],
    start_call: Callable[[Iterable[FrameworkCall]], FrameworkCall],
    open_calls: Mapping[UUID, ModelCall],
) -> ModelCall:
    """Return the model call of a run that begins; LangChain reports several prompts one by one.

    Args:
        run_id: id of the run.
        prompt: its messages, or its text.
        name: name of the model's class.
        event: other arguments of LangChain's callback.
        start_call: announces the run, given the framework calls around it.
        open_calls: open model runs and their calls.
    """
    size, current = int(event.get("batch_size") or 1), current_call.get()
    if current is None or len(current.runs) >= size or current.size != size:
        params, model = event.get("invocation_params") or {}, _running_model()
        around = innermost(open_calls)
        current = ModelCall(size, params=params, name=name, model=model, around=around)
        current_call.set(current)
    call = start_call(run.call for run in current.around)
    current.runs[run_id] = Run(prompt, call, current.around)
    return current


def innermost(open_calls: Mapping[UUID, ModelCall]) -> Sequence[Run]:
    """Return the model run that is innermost here; several if it may be each of them.

    Args:
        open_calls: open model runs and their calls.
    """
    if not open_calls:
        return ()
    current = current_call.get()
    runs: Sequence[Run] = () if current is None else [*current.runs.values()]
    while runs and not any(run.is_open for run in runs):
        runs = runs[0].around
    if len(runs) == 1:
        return runs
    run = _run_on_stack(open_calls)
    return runs if run is None else [run]


def _run_on_stack(open_calls: Mapping[UUID, ModelCall]) -> Run | None:
    """Return the model run whose method is on the stack.

    The context does not identify one of several prompts, nor a run that has begun to stream.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if _MANAGER in frame.f_code.co_varnames:
            run_id: Any = getattr(frame.f_locals.get(_MANAGER), "run_id", None)
            if run_id in open_calls:
                return open_calls[run_id].runs[run_id]
    return None


def _running_model() -> Any:
    """Return the innermost model whose method is on the stack; LangChain does not report it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, BaseLanguageModel):
                return owner
        frame = frame.f_back
    return None


_MANAGER: Final = "run_manager"
"""Parameter of every model's method with LangChain's manager of the run."""


def request(call: ModelCall, run_id: UUID) -> dict[str, Any]:
    """Return a run as an OpenAI chat request."""
    params = call.params
    model = params.get("model") or params.get("model_name") or call.name
    body: dict[str, Any] = {"model": str(model), "messages": _messages(call.runs[run_id].prompt)}
    for key in ("temperature", "top_p", "max_tokens", "seed", "n", "tools"):
        if params.get(key) is not None:
            body[key] = params[key]
    return body


def answer(result: Any) -> dict[str, Any]:
    """Return LangChain's result as an OpenAI chat completion; empty if there is none."""
    generations = getattr(result, "generations", None) or [[]]
    choices = [
        {"index": index, "message": message, "finish_reason": reason or "stop"}
        for index, (message, reason) in enumerate(map(_message_and_reason, generations[0]))
    ]
    return {"choices": choices, "usage": _usage(generations[0])} if choices else {}


def is_cached(result: Any) -> bool:
    """Return whether LangChain's cache answered, so that no client was used."""
    generations = getattr(result, "generations", None) or [[]]
    return any(_usage_of(generation).get("total_cost") == 0 for generation in generations[0])


def _message_and_reason(generation: Any) -> tuple[dict[str, Any], str | None]:
    message = getattr(generation, "message", None)
    if message is None:
        return {"role": "assistant", "content": generation.text}, None
    (converted,) = _messages([message])
    metadata = getattr(message, "response_metadata", None) or {}
    return converted, metadata.get("finish_reason") or metadata.get("stop_reason")


def _usage(generations: Sequence[Any]) -> dict[str, Any]:
    usage = _usage_of(generations[0]) if generations else {}
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
    }


def _usage_of(generation: Any) -> Mapping[str, Any]:
    return getattr(getattr(generation, "message", None), "usage_metadata", None) or {}


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(_converted(prompt))


def _converted(messages: Sequence[BaseMessage]) -> Iterator[dict[str, Any]]:
    for message in messages:
        try:
            converted: Any = convert_to_openai_messages(message)
        except Exception:  # the user's own role or content
            converted = {"role": message.type, "content": truncated_json(message.content, None)}
        yield from converted if isinstance(converted, list) else [converted]
