"""Find out the acting agent by wrapping the Agents SDK's tracing.

The SDK begins and ends its spans in the context in which the work happens. So when an agent's span
begins, the agent becomes the current one, and when it ends, the one before does. Tasks and threads
inherit the current agent. Tracing is often disabled where the model is not OpenAI's, and an app may
replace the processors at any time. Therefore `instrument()` wraps the SDK's provider, by its public
`set_trace_provider`: inside an attempt (one run of the app) it watches every span that the SDK
creates, whatever the wrapped provider does with it. The app's own processors get the same spans as
before, with one exception: inside a rollout, the SDK's default processor gets nothing, since it
would upload prompts to api.openai.com.

Errors of the adapter never reach the app: they are recorded as capture errors of the attempt.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from agents.tool_context import ToolContext
from agents.tracing import (
    Span,
    Trace,
    TraceProvider,
    TracingProcessor,
    get_trace_provider,
    set_trace_provider,
    setup,
)

from lightspan.instrumentation import (
    AdapterInstrumentor,
    AgentContext,
    AttemptHandle,
    Instrumentation,
    Patch,
    Recorder,
    SpanEnd,
    SpanStatus,
    current_agent,
    current_context,
    semconv,
    set_agent,
    start_attempt,
    truncated_json,
)
from lightspan_openai_agents import _bypass
from lightspan_openai_agents._bypass import adapter
from lightspan_openai_agents._identity import (
    GUARDRAIL_TRIGGERED,
    HANDOFF_FROM,
    HANDOFF_TO,
    NAME,
    WITHOUT_SPAN,
    Operation,
    OperationKind,
    Origin,
    begin,
    hand_over,
    span_of,
)
from lightspan_openai_agents._upload import exchange_default, with_upload, without_upload

_KINDS: Final = {kind.value: kind for kind in OperationKind}
"""Types of the SDK's spans that are watched."""

_watched: Final[ContextVar[_Watched | None]] = ContextVar(
    "lightspan_openai_agents_span", default=None
)
"""Wrapper of the SDK's current span; None if the operation in `AgentContext.notes` refers to it.

The wrapper is stored in only one of the two places, because setting one ContextVar takes half as
long as setting two. It has to be stored: an app may end a span that it gets from
`get_current_span()`, and the SDK's own spans cannot refer to the wrapper.
"""


@dataclass(slots=True)
class _State:
    """The adapter's state in this process."""

    handoffs: weakref.WeakKeyDictionary[Recorder, dict[str, Origin]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Recorder → handoffs of an attempt, for agents without a run (SDKs that have no `task`
    spans).
    """
    provider: _Provider | None = None
    tool_context: Patch | None = None
    """Patch of `ToolContext`'s constructor."""
    models: list[Patch] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)


_state: Final = _State()


# --- operations -----------------------------------------------------------------------------
class _Open:
    """An operation that has started, with what is needed to end it."""

    __slots__ = ("attempt", "handled", "leave", "operation")

    def __init__(self, operation: Operation, *, is_current: bool) -> None:
        self.operation = operation
        self.handled = sys.exception()
        """Exception that was already being handled at the start, so it is not the operation's."""
        self.attempt: AttemptHandle | None = None
        """Production attempt that began with the operation; None if none did."""
        self.leave: Callable[[], None] | None = None
        """Function that restores the context from before the operation; None if it did not
        change.
        """
        if is_current:
            self.leave = set_agent(operation.inside.with_note(NAME, operation))


def _begin(data: Any, *, is_current: bool = True, watched: _Watched | None = None) -> _Open | None:
    """Begin the operation of an SDK span, and return it. Never raises.

    Returns None if no attempt (recorded run of the app) is open, if spans of this kind are not
    recorded, or after a capture error.

    Args:
        data: the SDK's data of the span.
        is_current: whether the span becomes the current one.
        watched: our wrapper of the SDK's span; None if the span is not wrapped.
    """
    current = current_context()
    kind = _KINDS.get(data.type)
    if current is None or kind is None:
        return None
    recorder, attempt = current.scope.recorder, None
    try:
        name = str(getattr(data, "name", None) or "")
        if is_current:
            context, attempt = start_attempt(current, name or str(data.type))
        else:
            context = current_agent() or current
        recorder = context.scope.recorder
        parent = context.notes.get(NAME)
        handoffs = _state.handoffs.get(recorder) if parent is None else None
        operation = begin(kind, name, context, parent, handoffs)
        operation.watched = watched
        opened = _Open(operation, is_current=is_current)
        opened.attempt = attempt
        if operation.inside is not operation.around:
            recorder.register_pending(
                operation.key, partial(_record, operation, SpanEnd(SpanStatus.UNSET))
            )
        return opened
    except Exception as error:
        adapter.add_capture_error(recorder, error)
        if attempt is not None:
            attempt.close()
        return None


def _end(opened: _Open, data: Any, reported: Any) -> None:
    """Record the end of an operation. Never raises.

    Args:
        opened: the operation.
        data: the SDK's data of the span, complete now.
        reported: the SDK's `SpanError`; None if there is none.
    """
    operation = opened.operation
    recorder = operation.around.scope.recorder
    try:
        if opened.leave is not None:
            opened.leave()
        raised = sys.exception()
        error = None if raised is opened.handled else raised
        end = _span_end(operation, data, reported, error)
        if operation.inside is not operation.around:
            _record(operation, end)
        if operation.kind is OperationKind.HANDOFF:
            handoffs = _state.handoffs.setdefault(recorder, {})
            hand_over(operation, data.from_agent or "", data.to_agent or "", handoffs)
        if opened.attempt is not None:
            message = end.message if end.status is SpanStatus.ERROR else None
            opened.attempt.close(error or message)
    except Exception as error:
        adapter.add_capture_error(recorder, error)


def _record(operation: Operation, end: SpanEnd) -> None:
    """Record the span of an operation that has ended, unless this was done before."""
    recorder = operation.around.scope.recorder
    span = span_of(operation, end) if recorder.resolve_pending(operation.key) else None
    if span is not None:
        recorder.add(span)


_SUCCEEDED: Final = SpanEnd()


def _span_end(
    operation: Operation, data: Any, reported: Any, error: BaseException | None
) -> SpanEnd:
    attributes = {} if operation.kind in WITHOUT_SPAN else _end_attributes(operation.kind, data)
    if error is None and reported is None:
        return SpanEnd(attributes=attributes) if attributes else _SUCCEEDED
    if isinstance(error, GeneratorExit):
        return SpanEnd(SpanStatus.UNSET, attributes=attributes)
    if error is not None:
        end = SpanEnd.from_error(error)
        return end._replace(attributes={**attributes, **end.attributes})
    details = reported.get("data") or {}
    messages = [str(reported.get("message") or "error"), str(details.get("error") or "")]
    attributes = {**attributes, semconv.ERROR_TYPE: f"{operation.kind.name.title()}Error"}
    return SpanEnd(SpanStatus.ERROR, ": ".join(filter(None, messages)), attributes)


def _end_attributes(kind: OperationKind, data: Any) -> dict[str, Any]:
    """Return the span attributes that are known only when the operation has ended."""
    if kind is OperationKind.HANDOFF:
        return {HANDOFF_FROM: data.from_agent, HANDOFF_TO: data.to_agent}
    if kind is OperationKind.GUARDRAIL:
        return {GUARDRAIL_TRIGGERED: bool(data.triggered)}
    if kind is not OperationKind.TOOL:
        return {}
    attributes: dict[str, Any] = {}
    if data.input is not None:
        attributes[semconv.TOOL_CALL_ARGUMENTS] = truncated_json(data.input)
    if data.output is not None:
        attributes[semconv.TOOL_CALL_RESULT] = truncated_json(data.output)
    return attributes


# --- the processor --------------------------------------------------------------------------
class LightspanProcessor(TracingProcessor):
    """A trace processor that records agents: `add_trace_processor(LightspanProcessor())`.

    The SDK does not call it where tracing is disabled, and `set_trace_processors` removes it;
    `instrument()` has neither limit. If both are used, nothing is recorded twice.
    """

    def __init__(self) -> None:
        _watch_models()
        self._open: weakref.WeakKeyDictionary[Span[Any], _Open] = weakref.WeakKeyDictionary()

    def on_trace_start(self, trace: Trace) -> None:
        """Do nothing, because a trace has no agent name."""

    def on_trace_end(self, trace: Trace) -> None:
        """Do nothing, because a trace has no agent name."""

    def on_span_start(self, span: Span[Any]) -> None:
        """Begin to record the span's operation, unless `instrument()` does this already."""
        opened = None if _is_installed() else _begin(span.span_data)
        if opened is not None:
            self._open[span] = opened

    def on_span_end(self, span: Span[Any]) -> None:
        """End the operation that `on_span_start` began for the span, if any."""
        opened = self._open.pop(span, None)
        if opened is not None:
            _end(opened, span.span_data, span.error)

    def shutdown(self) -> None:
        """Do nothing."""

    def force_flush(self) -> None:
        """Do nothing."""


# --- the provider ---------------------------------------------------------------------------
class _Watched(Span[Any]):
    """A wrapper of an SDK span that begins and ends the span's operation."""

    _reported: Any = None
    _open: _Open | None = None
    _token: Token[_Watched | None] | None = None

    def __init__(self, inner: Span[Any]) -> None:
        self._inner = inner

    @property
    def inner(self) -> Span[Any]:
        return self._inner

    def start(self, mark_as_current: bool = False) -> None:
        if self._open is None:
            data = self._inner.span_data
            self._open = _begin(data, is_current=mark_as_current, watched=self)
        is_noted = self._open is not None and self._open.leave is not None
        if mark_as_current and not is_noted and self._token is None:
            self._token = _watched.set(self)
        self._inner.start(mark_as_current)

    def finish(self, reset_current: bool = False) -> None:
        self._end()
        self._inner.finish(reset_current)

    def __enter__(self) -> Self:
        self.start(mark_as_current=True)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self._end()
        self._inner.__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]

    def _end(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            _end(opened, self._inner.span_data, self._reported or self._inner.error)
        if self._token is not None:
            token, self._token = self._token, None
            _reset_watched(token)

    def set_error(self, error: Any) -> None:
        self._reported = error
        self._inner.set_error(error)

    @property
    def error(self) -> Any:
        return self._inner.error

    @property
    def trace_id(self) -> str:
        return self._inner.trace_id

    @property
    def span_id(self) -> str:
        return self._inner.span_id

    @property
    def span_data(self) -> Any:
        return self._inner.span_data

    @property
    def parent_id(self) -> str | None:
        return self._inner.parent_id

    @property
    def started_at(self) -> str | None:
        return self._inner.started_at

    @property
    def ended_at(self) -> str | None:
        return self._inner.ended_at

    @property
    def tracing_api_key(self) -> str | None:
        return self._inner.tracing_api_key

    @property
    def trace_metadata(self) -> dict[str, Any] | None:
        return self._inner.trace_metadata

    def export(self) -> dict[str, Any] | None:
        return self._inner.export()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _watching(span: Span[Any]) -> Span[Any]:
    """Return our wrapper of `span`, which is the SDK's current span.

    If there is no wrapper, return `span` itself.
    """
    current = current_context()
    operation = None if current is None else current.notes.get(NAME)
    while operation is not None:
        if operation.watched is not None and operation.watched.inner is span:
            return operation.watched  # type: ignore[no-any-return]
        operation = operation.parent
    watched = _watched.get()
    return watched if watched is not None and watched.inner is span else span


def _reset_watched(token: Token[_Watched | None]) -> None:
    try:
        _watched.reset(token)
    except ValueError:  # another context: an abandoned generator
        return


class _Provider(TraceProvider):
    """A wrapper of the app's trace provider that watches its spans.

    Args:
        inner: the wrapped provider; None for the SDK's default provider, which is created at its
            first use.
    """

    def __init__(self, inner: TraceProvider | None) -> None:
        self.on = True
        """Whether spans are watched. It is set to False where the wrapper cannot be removed,
        because another provider wraps it.
        """
        self._inner = inner

    @property
    def existing(self) -> TraceProvider | None:
        """Return the wrapped provider, without creating it.

        The result is None if the provider is the SDK's default and was not used yet.
        """
        return self._inner

    @property
    def inner(self) -> TraceProvider:
        if self._inner is None:
            with _state.lock:
                self._inner = self._inner or self._default()
        return self._inner

    def _default(self) -> TraceProvider:
        setup.GLOBAL_TRACE_PROVIDER = None
        try:
            default = get_trace_provider()
        finally:
            setup.GLOBAL_TRACE_PROVIDER = self
        exchange_default(default, without_upload)
        return default

    def create_span(
        self, span_data: Any, span_id: str | None = None, parent: Any = None, disabled: bool = False
    ) -> Span[Any]:
        if isinstance(parent, _Watched):
            parent = parent.inner
        span = (self._inner or self.inner).create_span(span_data, span_id, parent, disabled)
        is_watched = self.on and span_data.type in _KINDS and current_context() is not None
        return _Watched(span) if is_watched else span

    def get_current_span(self) -> Span[Any] | None:
        span = self.inner.get_current_span()
        return None if span is None else _watching(span)

    def create_trace(self, name: str, *args: Any, **options: Any) -> Trace:
        trace = self.inner.create_trace(name, *args, **options)
        current = current_context() if self.on else None
        if current is not None and current.scope.is_outside:
            _watch_trace(trace, name, is_off=bool(options.get("disabled")))
        return trace

    def get_current_trace(self) -> Trace | None:
        return self.inner.get_current_trace()

    def register_processor(self, processor: TracingProcessor) -> None:
        self.inner.register_processor(without_upload(processor) if self.on else processor)

    def set_processors(self, processors: list[TracingProcessor]) -> None:
        self.inner.set_processors(
            [without_upload(p) for p in processors] if self.on else processors
        )

    def set_disabled(self, disabled: bool) -> None:
        self.inner.set_disabled(disabled)

    def time_iso(self) -> str:
        return (self._inner or self.inner).time_iso()

    def gen_trace_id(self) -> str:
        return self.inner.gen_trace_id()

    def gen_span_id(self) -> str:
        return (self._inner or self.inner).gen_span_id()

    def gen_group_id(self) -> str:
        return self.inner.gen_group_id()

    def force_flush(self) -> None:
        if self._inner is not None:
            self._inner.force_flush()

    def shutdown(self, timeout: float | None = 5.0) -> None:
        """Shut down the wrapped provider, if it exists. The SDK calls this when the process ends.

        Args:
            timeout: seconds; passed on only if the provider's method has this parameter.
        """
        if self._inner is None:
            return
        if "timeout" in inspect.signature(self._inner.shutdown).parameters:
            self._inner.shutdown(timeout=timeout)  # type: ignore[call-arg]
        else:
            self._inner.shutdown()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


# --- traces, in production ------------------------------------------------------------------
def _watch_trace(trace: Trace, name: str, *, is_off: bool) -> None:
    """Patch the methods of a trace: when it starts, an attempt is opened unless one is open.

    Args:
        trace: the trace.
        name: name of the attempt. It is passed because the SDK names a disabled trace `no-op`.
        is_off: whether tracing is disabled. Then the SDK creates one more trace before each run,
            and the empty attempt of that trace is discarded.
    """
    watched = _WatchedTrace(trace, name, is_off)
    trace.start = watched.start  # type: ignore[method-assign]
    trace.finish = watched.finish  # type: ignore[method-assign]


class _WatchedTrace:
    """Replacements for the methods of a trace: `start` opens an attempt and `finish` closes it.

    If an attempt is open already, they only call the original methods.
    """

    def __init__(self, trace: Trace, name: str, is_off: bool) -> None:
        self._start, self._finish = trace.start, trace.finish
        self._name, self._is_off = name, is_off
        self._attempt: AttemptHandle | None = None
        self._leave: Callable[[], None] | None = None
        self._handled: BaseException | None = None

    def start(self, mark_as_current: bool = False) -> None:
        self._handled = sys.exception()
        current = current_context() if mark_as_current else None
        attempt = None if current is None else start_attempt(current, self._name)[1]
        if attempt is not None:
            self._attempt, self._leave = attempt, set_agent(attempt.context)
        self._start(mark_as_current)

    def finish(self, reset_current: bool = False) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None and self._leave is not None:
            self._leave()
            raised = sys.exception()
            error = None if raised is self._handled else raised
            if self._is_off and error is None:
                attempt.close_unless_empty()
            else:
                attempt.close(error)
        self._finish(reset_current)


# --- the id of a tool call ------------------------------------------------------------------
_MAKER: Final = "from_agent_context"
"""Name of the constructor of `ToolContext`, which the SDK calls once in the span of each tool call.

The result contains the id of the tool call, which is not in the span.
"""


def _wrap_maker(original: Any, _: Patch) -> Any:
    def from_agent_context(cls: Any, *args: Any, **options: Any) -> Any:
        tool_context = original.__get__(None, cls)(*args, **options)
        _record_tool_call(tool_context)
        return tool_context

    return classmethod(from_agent_context)


def _record_tool_call(tool_context: Any) -> None:
    current = current_context()
    operation = None if current is None else current.notes.get(NAME)
    if operation is None or operation.kind is not OperationKind.TOOL or operation.tool_call_id:
        return
    try:
        operation.tool_call_id = str(tool_context.tool_call_id or "")
        operation.arguments = truncated_json(tool_context.tool_arguments or "")
    except Exception as error:
        adapter.add_capture_error(operation.around.scope.recorder, error)


# --- installing -----------------------------------------------------------------------------
def instrument() -> Instrumentation:
    """Record every run of the Agents SDK in this process under the names of its agents.

    It may be called before or after agents are built, and repeatedly. As a context manager (`with
    instrument():`) it is undone at the end of the block.
    """
    with _state.lock:
        if _is_installed():
            return Instrumentation(None)
        _wrap_provider()
        _wrap_tool_context()
        _watch_models()
        adapter.enable()
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument` and restore the SDK; processors that the app has set stay."""
    adapter.disable()
    with _state.lock:
        if _state.tool_context is not None:
            _state.tool_context.undo()
            _state.tool_context = None
        while _state.models:
            _state.models.pop().undo()
        provider, _state.provider = _state.provider, None
        if provider is None:
            return
        provider.on = False
        exchange_default(provider.existing, with_upload)
        if setup.GLOBAL_TRACE_PROVIDER is provider:
            setup.GLOBAL_TRACE_PROVIDER = provider.existing


class Instrumentor(AdapterInstrumentor):
    """The instrumentor that `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)


def _watch_models() -> None:
    with _state.lock:
        _state.models = _state.models or _bypass.wrap()
        adapter.listen()


def _is_installed() -> bool:
    return _state.provider is not None


def _wrap_provider() -> None:
    inner = setup.GLOBAL_TRACE_PROVIDER
    exchange_default(inner, without_upload)
    _state.provider = _Provider(inner)
    set_trace_provider(_state.provider)


def _wrap_tool_context() -> None:
    original = vars(ToolContext).get(_MAKER)
    if original is not None:
        _state.tool_context = Patch(ToolContext, _MAKER, partial(_wrap_maker, original))


def _watch_provider(context: AgentContext) -> None:
    """Wrap the SDK's trace provider again if the app has replaced it.

    It is called before every model call. If a trace is open, our wrapper has not seen its agents
    begin. Then the agent of the model call is unknown, and a capture error is recorded.
    """
    if setup.GLOBAL_TRACE_PROVIDER is _state.provider or _state.provider is None:
        return
    with _state.lock:
        replaced = setup.GLOBAL_TRACE_PROVIDER
        if replaced is _state.provider or _state.provider is None:
            return
        _state.provider.on = False
        _wrap_provider()
    if replaced is not None and replaced.get_current_trace() is not None:
        context.scope.recorder.add_capture_error(
            "lightspan_openai_agents: the app called set_trace_provider() after instrument(), so "
            "the agent of this call is unknown; call instrument() after set_trace_provider()"
        )


_bypass.call_checks.append(_watch_provider)
