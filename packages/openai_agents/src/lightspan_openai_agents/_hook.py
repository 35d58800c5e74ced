"""Listens to the Agents SDK's tracing and tells core who is acting.

The SDK begins and ends its spans in the context in which the work happens, so an agent's frame is
pushed when its span begins and popped when it ends; tasks and threads inherit it. Tracing is often
disabled where the model is not OpenAI's, and an app may replace the processors at any time.
Therefore `instrument()` puts a provider around the SDK's, by its public `set_trace_provider`:
inside a rollout it watches every span that the SDK asks for, whatever the wrapped provider makes of
it. What the app's own processors get does not change, with one exception: inside a rollout, nothing
goes to the SDK's default processor, which would upload prompts to api.openai.com.

Errors never reach the app: they mark the attempt as damaged.
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
    CallEnd,
    Instrumentation,
    Patch,
    Recorder,
    SpanEnd,
    SpanStatus,
    add_call_listener,
    add_capture_error,
    current_context,
    disable_adapter,
    enable_adapter,
    remove_call_listener,
    reset_agent,
    resolve_agent,
    semconv,
    set_agent,
    start_attempt,
    truncated_json,
)
from lightspan_openai_agents import _bypass
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
    note_asked,
    span_of,
)
from lightspan_openai_agents._upload import exchange_default, restored, silenced

_KINDS: Final = {kind.value: kind for kind in OperationKind}
"""Of the SDK's spans that are watched."""

_watched: Final[ContextVar[_Watched | None]] = ContextVar(
    "lightspan_openai_agents_span", default=None
)
"""The span of the SDK's that is current in this context, if it is none that `AgentContext` notes
an operation of: the operation knows its span, and to set one ContextVar takes half as long as two.

The SDK's own spans have no room for ours, and an app may keep none but `get_current_span()` to end
one by.
"""


_SCOPES: Final = (
    "openinference.instrumentation.openai_agents",
    "opentelemetry.instrumentation.openai_agents",
)
"""OpenTelemetry's instrumentation scopes whose spans describe the same agents."""


@dataclass(slots=True)
class _State:
    """Of this process."""

    handed: weakref.WeakKeyDictionary[Recorder, dict[str, Origin]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Handoffs of an attempt whose agents are in no run (SDKs without `task` spans)."""
    provider: _Provider | None = None
    tool_context: Patch | None = None
    """Of `ToolContext`'s maker."""
    models: list[Patch] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)


_state: Final = _State()


# --- operations -----------------------------------------------------------------------------
class _Open:
    """An operation and what undoes it."""

    __slots__ = ("handled", "operation", "root", "token")

    def __init__(self, operation: Operation, *, is_current: bool) -> None:
        self.operation = operation
        self.handled = sys.exception()
        """What was being handled already when it began: not its error."""
        self.root: AttemptHandle | None = None
        """The attempt that began with it, in production."""
        self.token: Token[Any] | None = None
        """None where it is not what acts."""
        if is_current:
            self.token = set_agent(operation.inside.noting(NAME, operation))

    def leave(self) -> None:
        """Nothing acts in it any more."""
        token, self.token = self.token, None
        if token is not None:
            reset_agent(token)


def _begin(data: Any, *, is_current: bool = True, watched: _Watched | None = None) -> _Open | None:
    """Note that a span of the SDK's begins; None if it is none of ours. Never raises.

    Args:
        data: the SDK's data of the span.
        is_current: it becomes the current one.
        watched: what stands for the span.
    """
    current = current_context()
    kind = _KINDS.get(data.type)
    if current is None or kind is None:
        return None
    recorder, root = current.scope.recorder, None
    try:
        name = str(getattr(data, "name", None) or "")
        if is_current:
            acting, root = start_attempt(current, name or str(data.type))
        else:
            acting = resolve_agent(current)
        recorder = acting.scope.recorder
        parent = acting.notes.get(NAME)
        handed = _state.handed.get(recorder) if parent is None else None
        operation = begin(kind, name, acting, parent, handed)
        operation.watched = watched
        opened = _Open(operation, is_current=is_current)
        opened.root = root
        if operation.inside is not operation.around:
            recorder.expect(operation.key, partial(_record, operation, SpanEnd(SpanStatus.UNSET)))
        return opened
    except Exception as error:
        add_capture_error(recorder, NAME, error)
        if root is not None:
            root.close()
        return None


def _end(opened: _Open, data: Any, reported: Any) -> None:
    """Note that it ends. Never raises.

    Args:
        opened: what began.
        data: the SDK's data of the span, complete now.
        reported: the SDK's `SpanError`, if there is one.
    """
    operation = opened.operation
    recorder = operation.around.scope.recorder
    try:
        opened.leave()
        raised = sys.exception()
        error = None if raised is opened.handled else raised
        end = _ending(operation, data, reported, error)
        if operation.inside is not operation.around:
            _record(operation, end)
        if operation.kind is OperationKind.HANDOFF:
            handed = _state.handed.setdefault(recorder, {})
            hand_over(operation, data.from_agent or "", data.to_agent or "", handed)
        if opened.root is not None:
            opened.root.close(error or (end.message if end.status is SpanStatus.ERROR else None))
    except Exception as error:
        add_capture_error(recorder, NAME, error)


def _record(operation: Operation, end: SpanEnd) -> None:
    """Add its span, once."""
    recorder = operation.around.scope.recorder
    span = span_of(operation, end) if recorder.settle(operation.key) else None
    if span is not None:
        recorder.add(span)


_ENDED: Final = SpanEnd()


def _ending(operation: Operation, data: Any, reported: Any, error: BaseException | None) -> SpanEnd:
    describe = None if operation.kind in WITHOUT_SPAN else _DESCRIBED.get(operation.kind)
    attributes = {} if describe is None else describe(operation, data)
    if error is None and reported is None:
        return SpanEnd(attributes=attributes) if attributes else _ENDED
    if isinstance(error, GeneratorExit):
        return SpanEnd(SpanStatus.UNSET, attributes=attributes)
    if error is not None:
        end = SpanEnd.from_error(error)
        return end._replace(attributes={**attributes, **end.attributes})
    details = reported.get("data") or {}
    told = [str(reported.get("message") or "error"), str(details.get("error") or "")]
    failed = {**attributes, semconv.ERROR_TYPE: f"{operation.kind.name.title()}Error"}
    return SpanEnd(SpanStatus.ERROR, ": ".join(filter(None, told)), failed)


def _tool_said(operation: Operation, data: Any) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if data.input is not None:
        said[semconv.TOOL_CALL_ARGUMENTS] = truncated_json(data.input)
    if data.output is not None:
        said[semconv.TOOL_CALL_RESULT] = truncated_json(data.output)
    return said


def _handoff_said(operation: Operation, data: Any) -> dict[str, Any]:
    return {HANDOFF_FROM: data.from_agent, HANDOFF_TO: data.to_agent}


def _guardrail_said(operation: Operation, data: Any) -> dict[str, Any]:
    return {GUARDRAIL_TRIGGERED: bool(data.triggered)}


_DESCRIBED: Final[dict[OperationKind, Callable[[Operation, Any], dict[str, Any]]]] = {
    OperationKind.TOOL: _tool_said,
    OperationKind.HANDOFF: _handoff_said,
    OperationKind.GUARDRAIL: _guardrail_said,
}


# --- the processor --------------------------------------------------------------------------
class LightspanProcessor(TracingProcessor):
    """Tells lightspan which agent is acting: `add_trace_processor(LightspanProcessor())`.

    It hears nothing where tracing is disabled, and it is gone after `set_trace_processors`;
    `instrument()` needs neither. With both nothing is recorded twice.
    """

    def __init__(self) -> None:
        _watch_models()
        self._open: weakref.WeakKeyDictionary[Span[Any], _Open] = weakref.WeakKeyDictionary()

    def on_trace_start(self, trace: Trace) -> None:
        """A trace is no agent."""

    def on_trace_end(self, trace: Trace) -> None:
        """A trace is no agent."""

    def on_span_start(self, span: Span[Any]) -> None:
        """Who acts changes with an agent's span."""
        opened = None if _is_installed() else _begin(span.span_data)
        if opened is not None:
            self._open[span] = opened

    def on_span_end(self, span: Span[Any]) -> None:
        """The span's agent acts no more."""
        opened = self._open.pop(span, None)
        if opened is not None:
            _end(opened, span.span_data, span.error)

    def shutdown(self) -> None:
        """Nothing is kept."""

    def force_flush(self) -> None:
        """Nothing is kept."""


# --- the provider ---------------------------------------------------------------------------
class _Watched(Span[Any]):
    """A span of the wrapped provider's; it behaves as that one does."""

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
        is_noted = self._open is not None and self._open.token is not None
        if mark_as_current and not is_noted and self._token is None:
            self._token = _watched.set(self)
        self._inner.start(mark_as_current)

    def finish(self, reset_current: bool = False) -> None:
        self._ended()
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
        self._ended()
        self._inner.__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]

    def _ended(self) -> None:
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
    """What stands for a span that is current here; itself, if nothing does."""
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
    """The app's provider, watched.

    Args:
        inner: None for the SDK's default, which is made when it is first needed, as the SDK does.
    """

    def __init__(self, inner: TraceProvider | None) -> None:
        self.on = True
        """Whether it watches: one that somebody wrapped cannot be taken out."""
        self._inner = inner

    @property
    def made(self) -> TraceProvider | None:
        """The wrapped provider, if there is one yet."""
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
        exchange_default(default, silenced)
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
        made = self.inner.create_trace(name, *args, **options)
        current = current_context() if self.on else None
        if current is not None and current.scope.is_outside:
            _watch_trace(made, name, is_off=bool(options.get("disabled")))
        return made

    def get_current_trace(self) -> Trace | None:
        return self.inner.get_current_trace()

    def register_processor(self, processor: TracingProcessor) -> None:
        self.inner.register_processor(silenced(processor) if self.on else processor)

    def set_processors(self, processors: list[TracingProcessor]) -> None:
        self.inner.set_processors([silenced(p) for p in processors] if self.on else processors)

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
        """At the end of the process; the SDK gives its own provider five seconds."""
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
    """Make the trace an attempt of its own, as far as it is not in one when it starts.

    A disabled trace says that its name is `no-op`. Where a run is disabled, the SDK makes one for
    what goes before it, too, in which nothing happens (`is_off`).
    """
    watched = _WatchedTrace(trace, name, is_off)
    trace.start = watched.start  # type: ignore[method-assign]
    trace.finish = watched.finish  # type: ignore[method-assign]


class _WatchedTrace:
    """A trace whose runs are one attempt; it behaves as it did."""

    def __init__(self, trace: Trace, name: str, is_off: bool) -> None:
        self._start, self._finish = trace.start, trace.finish
        self._name, self._is_off = name, is_off
        self._root: AttemptHandle | None = None
        self._token: Token[Any] | None = None
        self._handled: BaseException | None = None

    def start(self, mark_as_current: bool = False) -> None:
        self._handled = sys.exception()
        current = current_context() if mark_as_current else None
        root = None if current is None else start_attempt(current, self._name)[1]
        if root is not None:
            self._root, self._token = root, set_agent(root.acting)
        self._start(mark_as_current)

    def finish(self, reset_current: bool = False) -> None:
        root, self._root = self._root, None
        if root is not None and self._token is not None:
            reset_agent(self._token)
            raised = sys.exception()
            error = None if raised is self._handled else raised
            if self._is_off and error is None:
                root.close_unless_empty()
            else:
                root.close(error)
        self._finish(reset_current)


# --- the id of a tool call ------------------------------------------------------------------
_MAKER: Final = "from_agent_context"
"""Of `ToolContext`: called once in each tool's span, with the id that the span does not have."""


def _noting(original: Any, _: Patch) -> Any:
    def from_agent_context(cls: Any, *args: Any, **options: Any) -> Any:
        made = original.__get__(None, cls)(*args, **options)
        _note_tool(made)
        return made

    return classmethod(from_agent_context)


def _note_tool(context: Any) -> None:
    current = current_context()
    operation = None if current is None else current.notes.get(NAME)
    if operation is None or operation.kind is not OperationKind.TOOL or operation.tool_call_id:
        return
    try:
        operation.tool_call_id = str(context.tool_call_id or "")
        operation.arguments = truncated_json(context.tool_arguments or "")
    except Exception as error:
        add_capture_error(operation.around.scope.recorder, NAME, error)


# --- installing -----------------------------------------------------------------------------
def instrument() -> Instrumentation:
    """Record every run of the Agents SDK in this process under the names of its agents.

    It may be called before or after agents are built; twice is once. As a context manager
    (`with instrument():`) it is undone at the end of the block.
    """
    with _state.lock:
        if _is_installed():
            return Instrumentation(None)
        _wrap_provider()
        _wrap_tool_context()
        _watch_models()
        enable_adapter(__name__, _SCOPES)
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument`; the SDK is left as it was, with the processors that the app gave it."""
    disable_adapter(__name__)
    with _state.lock:
        remove_call_listener(_note_call)
        if _state.tool_context is not None:
            _state.tool_context.undo()
            _state.tool_context = None
        while _state.models:
            _state.models.pop().undo()
        provider, _state.provider = _state.provider, None
        if provider is None:
            return
        provider.on = False
        exchange_default(provider.made, restored)
        if setup.GLOBAL_TRACE_PROVIDER is provider:
            setup.GLOBAL_TRACE_PROVIDER = provider.made


class Instrumentor(AdapterInstrumentor):
    """What `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)


def _watch_models() -> None:
    with _state.lock:
        _state.models = _state.models or _bypass.wrap()
        add_call_listener(_note_call)


def _is_installed() -> bool:
    return _state.provider is not None


def _wrap_provider() -> None:
    inner = setup.GLOBAL_TRACE_PROVIDER
    exchange_default(inner, silenced)
    _state.provider = _Provider(inner)
    set_trace_provider(_state.provider)


def _wrap_tool_context() -> None:
    original = vars(ToolContext).get(_MAKER)
    if original is not None:
        _state.tool_context = Patch(ToolContext, _MAKER, partial(_noting, original))


def _note_call(acting: AgentContext) -> CallEnd | None:
    """Somebody records a model call (`add_call_listener`).

    It is noted that this call did not bypass the clients that core sees, and seen to that the app
    has not put another provider in our place.
    """
    operation: Operation | None = acting.notes.get(NAME)
    ended = note_asked(operation)
    _watch_provider(acting)
    return ended


def _watch_provider(acting: AgentContext) -> None:
    if setup.GLOBAL_TRACE_PROVIDER is _state.provider or _state.provider is None:
        return
    with _state.lock:
        replaced = setup.GLOBAL_TRACE_PROVIDER
        if replaced is _state.provider or _state.provider is None:
            return
        _state.provider.on = False
        _wrap_provider()
    if replaced is not None and replaced.get_current_trace() is not None:
        acting.scope.recorder.add_capture_error(
            "lightspan_openai_agents: the app called set_trace_provider() after instrument(), so "
            "it is not known which agent made this call; call instrument() after it"
        )
