"""Record model calls whose client does not use the OpenAI SDK, such as LiteLLM's.

The Agents SDK calls every model by `get_response` or `stream_response`. Both are wrapped in every
class, and their arguments and results are recorded. Calls in which the OpenAI SDK was used are
recorded by the SDK instrumentation instead.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FunctionType
from typing import Any, Final

from agents import FunctionTool, Handoff, Model, ModelResponse

from lightspan.instrumentation import (
    Adapter,
    AgentContext,
    AttemptHandle,
    FrameworkCall,
    Patch,
    SpanEnd,
    StreamedAnswer,
    current_context,
    patch_subclasses,
    record_call,
    set_agent,
    start_attempt,
)
from lightspan_openai_agents._identity import (
    NAME,
    Operation,
    OperationKind,
    begin,
    open_calls,
)

_SIGNATURE: Final = inspect.signature(Model.get_response)


call_checks: Final[list[Callable[[AgentContext], None]]] = []
"""Functions to call at the start of every recorded model call."""


def _open_calls(context: AgentContext) -> list[FrameworkCall]:
    """Return the model calls that are open in `context`, innermost first.

    The functions in `call_checks` are called with `context` before.
    """
    for check in call_checks:
        check(context)
    return open_calls(context.notes.get(NAME))


adapter: Final = Adapter(
    NAME,
    (
        "openinference.instrumentation.openai_agents",
        "opentelemetry.instrumentation.openai_agents",
    ),
    open_calls=_open_calls,
)


# --- model calls ----------------------------------------------------------------------------
@dataclass(slots=True, eq=False)
class _ModelCall:
    """One open call of a model."""

    model: Model
    operation: Operation
    call: FrameworkCall
    inside: AgentContext
    """Context in which the next step of the call runs. The last step may have changed it."""
    attempt: AttemptHandle | None
    args: Any
    options: Mapping[str, Any]
    chunks: StreamedAnswer | None
    """Collector of a streamed answer; None if the answer is not streamed."""
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    def request(self) -> dict[str, Any]:
        """Return the body of the call as an OpenAI Responses request."""
        options = {key: self.options[key] for key in _SIGNATURE.parameters if key in self.options}
        arguments = _SIGNATURE.bind_partial(self.model, *self.args, **options).arguments
        settings = arguments.get("model_settings")
        name = getattr(self.model, "model", None)
        return {
            "model": name if isinstance(name, str) else type(self.model).__name__,
            "instructions": arguments.get("system_instructions"),
            "input": arguments.get("input") or [],
            "tools": list(_tools(arguments)),
            "temperature": getattr(settings, "temperature", None),
            "top_p": getattr(settings, "top_p", None),
            "max_output_tokens": getattr(settings, "max_tokens", None),
            "stream": None if self.chunks is None else True,
        }


def _tools(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for tool in (*(arguments.get("tools") or ()), *(arguments.get("handoffs") or ())):
        if isinstance(tool, FunctionTool):
            yield _function(tool.name, tool.description, tool.params_json_schema)
        elif isinstance(tool, Handoff):
            yield _function(tool.tool_name, tool.tool_description, tool.input_json_schema)
        else:  # a hosted tool
            yield {"type": tool.name}


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": name, "description": description}
    return {"type": "function", **named, "parameters": parameters}


def _answer(response: ModelResponse) -> dict[str, Any]:
    usage = response.usage
    counts = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
    return {
        "id": response.response_id,
        "output": [_mapping(item) for item in response.output],
        "usage": counts if usage.requests else {},  # without a request nothing was counted
    }


def _mapping(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping):
        return dict(item)
    return item.model_dump(mode="json", exclude_unset=True, warnings=False)  # type: ignore[no-any-return]


def _begin(model: Model, args: Any, options: Any, *, streamed: bool) -> _ModelCall | None:
    """Begin a call of `model` and return it. Never raises.

    Returns None if nothing is recorded, or after a capture error.

    Args:
        model: the model.
        args: positional arguments of the model's method.
        options: keyword arguments of the model's method.
        streamed: whether the answer is streamed.
    """
    context = current_context()
    if context is None:
        return None
    attempt = None
    try:
        context, attempt = start_attempt(context, None)
        call = adapter.start_call(context)
        if not context.scope.recorder.keeps:
            return None
        operation = begin(OperationKind.MODEL, "", context, context.notes.get(NAME))
        operation.call = call
        inside = operation.inside.with_note(NAME, operation)
        chunks = StreamedAnswer() if streamed else None
        model_call = _ModelCall(model, operation, call, inside, attempt, args, options, chunks)
        context.scope.recorder.register_pending(
            model_call.key, partial(_end, model_call, None, GeneratorExit())
        )
        return model_call
    except Exception as error:
        adapter.add_capture_error(context.scope.recorder, error)
        if attempt is not None:
            attempt.close()
        return None


def _end(
    model_call: _ModelCall, response: ModelResponse | None, error: BaseException | None
) -> None:
    """End a model call, and record it. Never raises.

    It is not recorded if the OpenAI SDK made the call and has recorded it.

    Args:
        model_call: the model call.
        response: the response; None if it was streamed or failed.
        error: exception that ended the call; None if it succeeded.
    """
    recorder, chunks = model_call.operation.around.scope.recorder, model_call.chunks
    try:
        if isinstance(error, GeneratorExit) and chunks is not None and chunks.complete:
            error = None
        if recorder.resolve_pending(model_call.key):
            is_answered = error is None or isinstance(error, GeneratorExit)
            model_call.call.end(is_answered=is_answered)
            _record(model_call, response, error)
    except Exception as failure:
        adapter.add_capture_error(recorder, failure)
    if model_call.attempt is not None:
        model_call.attempt.close(error)


def _record(
    model_call: _ModelCall, response: ModelResponse | None, error: BaseException | None
) -> None:
    if not model_call.call.needs_record(is_ok=error is None):
        return
    chunks = model_call.chunks or StreamedAnswer()
    record_call(
        model_call.operation.around,
        model_call.request(),
        chunks.answer() if response is None else _answer(response),
        SpanEnd() if error is None else SpanEnd.from_error(error),
        start_ns=model_call.operation.start_ns,
        client=model_call.model,
        native="agents.OpenAIChatCompletionsModel",
    )


async def _step(model_call: _ModelCall, step: Awaitable[Any]) -> Any:
    """Await `step`, one step of a model call, in the context inside the call.

    Changes of the context during the step are kept for the next step.
    """
    leave = set_agent(model_call.inside)
    try:
        return await step
    finally:
        model_call.inside = current_context() or model_call.inside
        leave()


# --- wrapping -------------------------------------------------------------------------------
def _get_response(original: Any, patch: Patch) -> Any:
    @wraps(original)
    async def get_response(self: Model, *args: Any, **options: Any) -> ModelResponse:
        call = _begin(self, args, options, streamed=False) if patch.on else None
        if call is None:
            return await original(self, *args, **options)  # type: ignore[no-any-return]
        try:
            response: ModelResponse = await _step(call, original(self, *args, **options))
        except BaseException as error:
            _end(call, None, error)
            raise
        _end(call, response, None)
        return response

    return get_response


def _stream_response(original: Any, patch: Patch) -> Any:
    @wraps(original)
    async def stream_response(self: Model, *args: Any, **options: Any) -> AsyncIterator[Any]:
        call = _begin(self, args, options, streamed=True) if patch.on else None
        events = original(self, *args, **options)
        if call is None:
            async for event in events:
                yield event
            return
        events = aiter(events)
        try:
            while True:
                try:
                    event = await _step(call, anext(events))
                except StopAsyncIteration:
                    break
                _add_chunk(call, event)
                yield event
        except BaseException as error:
            try:
                if hasattr(events, "aclose"):  # first, so that spans inside end first
                    await _step(call, events.aclose())
            finally:
                _end(call, None, error)
            raise
        _end(call, None, None)

    return stream_response


def _add_chunk(call: _ModelCall, event: Any) -> None:
    try:
        if call.chunks is not None:
            call.chunks.add(event)
    except Exception as error:
        adapter.add_capture_error(call.operation.around.scope.recorder, error)


_WRAPPERS: Final = {"get_response": _get_response, "stream_response": _stream_response}


def wrap() -> list[Patch]:
    """Wrap every model class, including those that are defined later."""
    patches: list[Patch] = []
    patches.append(patch_subclasses(Model, partial(_wrap_class, patches=patches)))
    return patches


def _wrap_class(cls: type, patches: list[Patch]) -> None:
    for name, make in _WRAPPERS.items():
        function = vars(cls).get(name)
        if isinstance(function, FunctionType) and not hasattr(function, "__isabstractmethod__"):
            patches.append(Patch(cls, name, partial(make, function)))
