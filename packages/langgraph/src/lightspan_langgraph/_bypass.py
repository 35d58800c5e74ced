"""Record model calls of LangChain whose client does not use the OpenAI SDK.

Their records have no tokens. See `lightspan.capture.other_clients`.

LangChain calls the handler when a model run begins and ends. If a patch of the OpenAI SDK records a
call in between, it is the call of this run. Otherwise another client made the call, or LangChain's
cache answered, and the call is recorded from the run.
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

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage, convert_to_openai_messages

from lightspan.instrumentation import FrameworkCall, truncated_json


@dataclass(slots=True, eq=False)
class Run:
    """A run of a model, as LangChain reports it."""

    prompt: Any
    """List of messages, or a text prompt."""
    call: FrameworkCall
    around: Sequence[Run]
    """The enclosing model run; several if it is unclear which one encloses, empty if there is
    none.
    """
    is_open: bool = True

    def end(self, *, is_answered: bool) -> None:
        """Mark the run as ended, and notify lightspan.

        Args:
            is_answered: whether the model has answered.
        """
        self.is_open = False
        self.call.end(is_answered=is_answered)


@dataclass(slots=True, eq=False)
class ModelCall:
    """One call of a model, which LangChain reports as one run per prompt (`generate`)."""

    size: int
    """Number of prompts."""
    runs: dict[UUID, Run] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    model: Any = None
    """The model; None if it is unknown."""
    around: Sequence[Run] = ()
    """Value of `Run.around` for every run of the call."""
    start_ns: int = field(default_factory=time.time_ns)

    @property
    def last_run(self) -> UUID | None:
        """Id of the run that began last; None before the first run."""
        return next(reversed(self.runs), None)


current_call: Final[ContextVar[ModelCall | None]] = ContextVar(
    "lightspan_langgraph_asking", default=None
)
"""The last model call that began in this context; None if there is none or a token was streamed.

The call is not stored in `AgentContext.notes`, because a model run may end in another context
than it began. There the note could not be removed, and the frames pushed with the note would stay.
"""


def begin(
    run_id: UUID,
    prompt: Any,
    name: str,
    event: Mapping[str, Any],
    start_call: Callable[[Iterable[FrameworkCall]], FrameworkCall],
    open_calls: Mapping[UUID, ModelCall],
) -> ModelCall:
    """Return the model call to which a beginning run belongs.

    LangChain reports a call with several prompts as several runs, one per prompt, one after the
    other. The first one creates the model call, and the others are added to it.

    Args:
        run_id: id of the run.
        prompt: messages or text prompt of the run.
        name: name of the model's class.
        event: remaining keyword arguments of LangChain's callback.
        start_call: function that notifies lightspan of a model call; it takes the enclosing model
            calls.
        open_calls: the model call of each open model run, by the run's id.
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
    """Return the innermost open model run of the current context.

    Returns several runs if it is unclear which one is innermost, and an empty sequence if there is
    none.

    Args:
        open_calls: the model call of each open model run, by the run's id.
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
    """Return the innermost model run whose method is on the call stack; None if there is none.

    It is used where a context variable does not identify the run: if a call has several prompts, or
    if the run has begun to stream.

    Args:
        open_calls: the model call of each open model run, by the run's id.
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
    """Return the model whose method is innermost on the call stack; None if there is none.

    LangChain does not pass the model to callbacks.
    """
    return _owner_on_stack(BaseLanguageModel)


def running_manager() -> Any:
    """Return the callback manager that reports the beginning run; None if there is none.

    It is freed when the model's method returns.
    """
    return _owner_on_stack(BaseCallbackManager)


def _owner_on_stack(kind: type) -> Any:
    """Return the innermost object of a class whose method is on the call stack, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, kind):
                return owner
        frame = frame.f_back
    return None


_MANAGER: Final = "run_manager"
"""Name of the parameter of a model's methods that receives LangChain's run manager."""


def request(call: ModelCall, run_id: UUID) -> dict[str, Any]:
    """Return the prompt and the parameters of a model run as an OpenAI chat request.

    Args:
        call: model call that contains the run.
        run_id: id of the run.
    """
    params = call.params
    model = params.get("model") or params.get("model_name") or call.name
    body: dict[str, Any] = {"model": str(model), "messages": _messages(call.runs[run_id].prompt)}
    for key in ("temperature", "top_p", "max_tokens", "seed", "n", "tools"):
        if params.get(key) is not None:
            body[key] = params[key]
    return body


def answer(result: Any) -> dict[str, Any]:
    """Return LangChain's `result` as an OpenAI chat completion; empty if it has no generations."""
    generations = getattr(result, "generations", None) or [[]]
    choices = [
        {"index": index, "message": message, "finish_reason": reason or "stop"}
        for index, (message, reason) in enumerate(map(_message_and_reason, generations[0]))
    ]
    return {"choices": choices, "usage": _usage(generations[0])} if choices else {}


def is_cached(result: Any) -> bool:
    """Return whether `result` comes from LangChain's cache instead of a model client."""
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
        except Exception:  # a role or content that LangChain cannot convert
            converted = {"role": message.type, "content": truncated_json(message.content, None)}
        yield from converted if isinstance(converted, list) else [converted]
