"""Calls of models that do not use the OpenAI SDK: a `Model` of the user's own, LiteLLM's.

The SDK asks every model by `get_response` or `stream_response`: both are wrapped in every class,
and say what was asked and answered. A call in which the OpenAI SDK was asked is core's to record.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FunctionType
from typing import Any, Final

from agents import FunctionTool, Handoff, Model, ModelResponse

from lightspan.instrumentation import (
    AgentContext,
    AttemptHandle,
    CallEnd,
    Patch,
    SpanEnd,
    StreamedAnswer,
    add_capture_error,
    current_context,
    new_span_id,
    notify_call_start,
    patch_subclasses,
    record_call,
    reset_agent,
    set_agent,
    start_attempt,
)
from lightspan_openai_agents._identity import (
    NAME,
    Operation,
    OperationKind,
    begin,
)

_ASKED: Final = inspect.signature(Model.get_response)


# --- what models are asked ------------------------------------------------------------------
@dataclass(slots=True, eq=False)
class _Ask:
    """One call of a model, under way."""

    model: Model
    operation: Operation
    inside: AgentContext
    """Who acts in it, as far as it has come."""
    root: AttemptHandle | None
    told: CallEnd
    """See `notify_call_start`."""
    args: Any
    options: Mapping[str, Any]
    chunks: StreamedAnswer | None
    """Of a streamed answer, which is gathered there."""
    key: str = field(default_factory=new_span_id)

    def request(self) -> dict[str, Any]:
        """Return what was asked, as the body of a request for a response."""
        known = {name: self.options[name] for name in _ASKED.parameters if name in self.options}
        given = _ASKED.bind_partial(self.model, *self.args, **known).arguments
        settings = given.get("model_settings")
        own = getattr(self.model, "model", None)
        kind = type(self.model).__name__
        return {
            "model": own if isinstance(own, str) else kind,
            "instructions": given.get("system_instructions"),
            "input": given.get("input") or [],
            "tools": list(_tools(given)),
            "temperature": getattr(settings, "temperature", None),
            "top_p": getattr(settings, "top_p", None),
            "max_output_tokens": getattr(settings, "max_tokens", None),
            "stream": None if self.chunks is None else True,
        }


def _tools(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for tool in (*(given.get("tools") or ()), *(given.get("handoffs") or ())):
        if isinstance(tool, FunctionTool):
            yield _function(tool.name, tool.description, tool.params_json_schema)
        elif isinstance(tool, Handoff):
            yield _function(tool.tool_name, tool.tool_description, tool.input_json_schema)
        else:  # hosted, by whoever serves the model
            yield {"type": tool.name}


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": name, "description": description}
    return {"type": "function", **named, "parameters": parameters}


def _answer(response: ModelResponse) -> dict[str, Any]:
    output = [_mapping(item) for item in response.output]
    used = response.usage
    counts = {"input_tokens": used.input_tokens, "output_tokens": used.output_tokens}
    return {
        "id": response.response_id,
        "output": output,
        "usage": counts if used.requests else {},  # else nobody counted
    }


def _mapping(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return dict(item)
    return item.model_dump(mode="json", exclude_unset=True, warnings=False)  # type: ignore[no-any-return]


def _begin(model: Model, args: Any, options: Any, *, streamed: bool) -> _Ask | None:
    """The call that begins; None where nothing is recorded. Never raises."""
    current = current_context()
    if current is None:
        return None
    root = None
    try:
        acting, root = start_attempt(current, None)
        told = notify_call_start(acting)
        current = acting
        if not acting.scope.recorder.keeps:
            return None
        operation = begin(OperationKind.MODEL, "", acting, acting.notes.get(NAME))
        inside = operation.inside.noting(NAME, operation)
        chunks = StreamedAnswer() if streamed else None
        ask = _Ask(model, operation, inside, root, told, args, options, chunks)
        acting.scope.recorder.expect(ask.key, partial(_end, ask, None, GeneratorExit()))
        return ask
    except Exception as error:
        add_capture_error(current.scope.recorder, NAME, error)
        if root is not None:
            root.close()
        return None


def _end(ask: _Ask, response: ModelResponse | None, error: BaseException | None) -> None:
    """Record it, once, unless somebody inside knows more of it. Never raises."""
    recorder = ask.operation.around.scope.recorder
    try:
        if isinstance(error, GeneratorExit) and ask.chunks is not None and ask.chunks.complete:
            error = None
        if recorder.settle(ask.key):
            ask.told(error is None or isinstance(error, GeneratorExit))
            _record(ask, response, error)
    except Exception as failure:
        add_capture_error(recorder, NAME, failure)
    if ask.root is not None:
        ask.root.close(error)


def _record(ask: _Ask, response: ModelResponse | None, error: BaseException | None) -> None:
    calls = ask.operation.calls
    if calls is not None and not calls.needs_record(is_ok=error is None):
        return
    gathered = ask.chunks or StreamedAnswer()
    answer = gathered.answer() if response is None else _answer(response)
    record_call(
        ask.operation.around,
        ask.request(),
        answer,
        SpanEnd() if error is None else SpanEnd.from_error(error),
        start_ns=ask.operation.start_ns,
        client=ask.model,
        native="agents.OpenAIChatCompletionsModel",
    )


async def _step(ask: _Ask, step: Awaitable[Any]) -> Any:
    """Take it with the call acting."""
    token = set_agent(ask.inside)
    try:
        return await step
    finally:
        ask.inside = current_context() or ask.inside
        reset_agent(token)


# --- wrapping -------------------------------------------------------------------------------
def _get_response(original: Any, patch: Patch) -> Any:
    @wraps(original)
    async def get_response(self: Model, *args: Any, **options: Any) -> ModelResponse:
        ask = _begin(self, args, options, streamed=False) if patch.on else None
        if ask is None:
            return await original(self, *args, **options)  # type: ignore[no-any-return]
        try:
            response: ModelResponse = await _step(ask, original(self, *args, **options))
        except BaseException as error:
            _end(ask, None, error)
            raise
        _end(ask, response, None)
        return response

    return get_response


def _stream_response(original: Any, patch: Patch) -> Any:
    @wraps(original)
    async def stream_response(self: Model, *args: Any, **options: Any) -> AsyncIterator[Any]:
        ask = _begin(self, args, options, streamed=True) if patch.on else None
        events = original(self, *args, **options)
        if ask is None:
            async for event in events:
                yield event
            return
        events = aiter(events)
        try:
            while True:
                try:
                    event = await _step(ask, anext(events))
                except StopAsyncIteration:
                    break
                _gather(ask, event)
                yield event
        except BaseException as error:
            try:
                if hasattr(events, "aclose"):  # the spans inside end first
                    await _step(ask, events.aclose())
            finally:
                _end(ask, None, error)
            raise
        _end(ask, None, None)

    return stream_response


def _gather(ask: _Ask, event: Any) -> None:
    try:
        if ask.chunks is not None:
            ask.chunks.add(event)
    except Exception as error:
        add_capture_error(ask.operation.around.scope.recorder, NAME, error)


_MAKE: Final = {"get_response": _get_response, "stream_response": _stream_response}


def wrap() -> list[Patch]:
    """Wrap every class of models, also those that are defined from now on."""
    patches: list[Patch] = []
    patches.append(patch_subclasses(Model, partial(_wrap_class, patches=patches)))
    return patches


def _wrap_class(known: type, patches: list[Patch]) -> None:
    for name, make in _MAKE.items():
        function = vars(known).get(name)
        if isinstance(function, FunctionType) and not hasattr(function, "__isabstractmethod__"):
            patches.append(Patch(known, name, partial(make, function)))
