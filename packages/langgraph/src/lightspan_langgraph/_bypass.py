"""Model clients that do not use the OpenAI SDK: their calls are recorded, without tokens.

See `capture.bypass`. LangChain tells of every model that begins to answer. If the wire shim
asks who is acting before it ends, core knows of the call; if nobody does, it bypassed the SDK, or
LangChain's cache answered.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final
from uuid import UUID

from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage, convert_to_openai_messages

from lightspan.instrumentation import (
    CallEnd,
    NestedCalls,
    truncated_json,
)


@dataclass(slots=True, eq=False)
class Run:
    """A model run."""

    prompt: Any
    """A list of messages, or a text."""
    told: CallEnd
    """See `notify_call_start`."""
    around: Sequence[Run]
    """The model runs that it is in: one, or those of which it is one."""
    ends: Sequence[CallEnd]
    """Those that tell them."""
    inside: NestedCalls = field(default_factory=NestedCalls)
    """That somebody records: the wire shim, or a client inside."""
    is_open: bool = True

    def ended(self, *, is_answered: bool) -> None:
        """It has ended, and whoever is around it hears of that."""
        self.is_open = False
        for told in (self.told, *self.ends):
            told(is_answered)


@dataclass(slots=True, eq=False)
class Asking:
    """The model runs of one call of a model: one, or with several prompts (`generate`) each."""

    size: int
    runs: dict[UUID, Run] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    model: Any = None
    """What is asked; None where it is not known."""
    around: Sequence[Run] = ()
    """The model runs that they are in."""
    start_ns: int = field(default_factory=time.time_ns)

    @property
    def last(self) -> UUID | None:
        """The run that began last."""
        return next(reversed(self.runs), None)


asking: Final[ContextVar[Asking | None]] = ContextVar("lightspan_langgraph_asking", default=None)
"""What last began to ask a model in this context and has not answered yet.

It is no note of `AgentContext`: a model run may end in another context than it began in, where a
note could not be taken back, and the frames pushed with it would stay.
"""


def begin(
    run_id: UUID,
    prompt: Any,
    name: str,
    event: Mapping[str, Any],
    told: CallEnd,
    known: Mapping[UUID, Asking],
) -> Asking:
    """A model run begins; it may be one of several that LangChain tells of one after the other.

    Args:
        run_id: its id.
        prompt: its messages, or its text.
        name: of the model's class.
        event: what else LangChain tells.
        told: see `notify_call_start`.
        known: the model runs that are open.
    """
    size, current = int(event.get("batch_size") or 1), asking.get()
    if current is None or len(current.runs) >= size or current.size != size:
        params, model = event.get("invocation_params") or {}, _running_model()
        current = Asking(size, params=params, name=name, model=model, around=innermost(known))
        asking.set(current)
    ends = [run.inside.start() for run in current.around]
    current.runs[run_id] = Run(prompt, told, current.around, ends)
    return current


def innermost(known: Mapping[UUID, Asking]) -> Sequence[Run]:
    """The model run that asks in this context; several if it may be each of them.

    Args:
        known: the open model runs.
    """
    if not known:
        return ()
    current = asking.get()
    runs: Sequence[Run] = () if current is None else [*current.runs.values()]
    while runs and not any(run.is_open for run in runs):
        runs = runs[0].around
    if len(runs) == 1:
        return runs
    found = _on_stack(known)
    return runs if found is None else [found]


def _on_stack(known: Mapping[UUID, Asking]) -> Run | None:
    """The model run whose method is running: of several prompts, or of one that has begun to
    stream, the context does not say it."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if _MANAGER in frame.f_code.co_varnames:
            run_id: Any = getattr(frame.f_locals.get(_MANAGER), "run_id", None)
            if run_id in known:
                return known[run_id].runs[run_id]
    return None


def _running_model() -> Any:
    """Return the innermost model whose method is running; LangChain does not name it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, BaseLanguageModel):
                return owner
        frame = frame.f_back
    return None


_MANAGER: Final = "run_manager"
"""What every method of a model calls what LangChain gives it of the run."""


def request(ask: Asking, run_id: UUID) -> dict[str, Any]:
    """The call as a chat request."""
    params = ask.params
    model = params.get("model") or params.get("model_name") or ask.name
    known: dict[str, Any] = {"model": str(model), "messages": _messages(ask.runs[run_id].prompt)}
    for key in ("temperature", "top_p", "max_tokens", "seed", "n", "tools"):
        if params.get(key) is not None:
            known[key] = params[key]
    return known


def answer(response: Any) -> dict[str, Any]:
    """The result of LangChain's as a chat completion; empty if there is none."""
    generations = getattr(response, "generations", None) or [[]]
    choices = [
        {"index": index, "message": said, "finish_reason": reason or "stop"}
        for index, (said, reason) in enumerate(map(_said, generations[0]))
    ]
    return {"choices": choices, "usage": _usage(generations[0])} if choices else {}


def is_cached(response: Any) -> bool:
    """Whether LangChain's own cache answered: then no client was used."""
    generations = getattr(response, "generations", None) or [[]]
    return any(_usage_of(one).get("total_cost") == 0 for one in generations[0])


def _said(generation: Any) -> tuple[dict[str, Any], str | None]:
    message = getattr(generation, "message", None)
    if message is None:
        return {"role": "assistant", "content": generation.text}, None
    (plain,) = _messages([message])
    metadata = getattr(message, "response_metadata", None) or {}
    return plain, metadata.get("finish_reason") or metadata.get("stop_reason")


def _usage(generations: Sequence[Any]) -> dict[str, Any]:
    told = _usage_of(generations[0]) if generations else {}
    return {
        "prompt_tokens": told.get("input_tokens"),
        "completion_tokens": told.get("output_tokens"),
    }


def _usage_of(generation: Any) -> Mapping[str, Any]:
    return getattr(getattr(generation, "message", None), "usage_metadata", None) or {}


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return list(_plain(prompt))


def _plain(messages: Sequence[BaseMessage]) -> Iterator[dict[str, Any]]:
    for message in messages:
        try:
            converted: Any = convert_to_openai_messages(message)
        except Exception:  # a role or a content of the user's own
            converted = {"role": message.type, "content": truncated_json(message.content, None)}
        yield from converted if isinstance(converted, list) else [converted]
