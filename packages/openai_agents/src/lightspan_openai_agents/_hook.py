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
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, Self

from agents.tool_context import ToolContext
from agents.tracing import (
    Span,
    Trace,
    TraceProvider,
    TracingProcessor,
    get_trace_provider,
    processors,
    set_trace_provider,
    setup,
)

from lightspan import conventions, recording, scope
from lightspan.emit import exception_attributes, text_of
from lightspan.instrumentation import AdapterInstrumentor, Instrumentation, shown
from lightspan.records import Mode
from lightspan.spans import SpanStatus
from lightspan_openai_agents._identity import (
    GUARDRAIL_TRIGGERED,
    HANDOFF_FROM,
    HANDOFF_TO,
    MODEL_CALLS,
    End,
    Operation,
    OperationKind,
    Origin,
    begin,
    bypassing_call,
    hand_over,
    span_of,
)

_MAY_BYPASS: Final = (OperationKind.TURN, *MODEL_CALLS)
_KINDS: Final = {kind.value: kind for kind in OperationKind}

_operation: ContextVar[Operation | None] = ContextVar(
    "lightspan_openai_agents_operation", default=None
)
"""The innermost operation of this context."""
_watched: ContextVar[_Watched | None] = ContextVar("lightspan_openai_agents_span", default=None)
"""The span of the SDK's that is current in this context."""
_handed: weakref.WeakKeyDictionary[scope.Recorder, dict[str, Origin]] = weakref.WeakKeyDictionary()
"""Handoffs of an attempt whose agents are in no run (SDKs without `task` spans)."""
_lock = threading.RLock()


# --- operations -----------------------------------------------------------------------------
class _Open:
    """An operation and what undoes it."""

    def __init__(self, operation: Operation, *, is_current: bool) -> None:
        self.operation = operation
        self.handled = sys.exception()
        """What was being handled already when it began: not its error."""
        self.root: scope.Root | None = None
        """The attempt that began with it, in production."""
        self._is_current = is_current
        self._tokens: tuple[Token[Any], Token[Any]] | None = None
        if is_current:
            inside = operation.inside
            self._tokens = (_operation.set(operation), scope.set_acting(inside))

    def leave(self) -> None:
        """Nothing acts in it any more."""
        if self._tokens is None:
            return
        (operation, acting), self._tokens = self._tokens, None
        scope.reset_acting(acting)
        _reset(_operation, operation)


def _begin(data: Any, *, is_current: bool = True) -> _Open | None:
    """Note that a span of the SDK's begins; None if it is none of ours. Never raises."""
    current = scope.pushed()
    kind = _KINDS.get(data.type)
    if current is None or kind is None:
        return None
    recorder = current.scope.recorder
    try:
        scope.register_resolver(_resolve)  # the processor may be all that there is
        acting = _given(current)
        label = str(getattr(data, "name", None) or data.type)
        root = scope.open_root(acting, label) if is_current else None
        acting = acting if root is None else root.acting
        recorder = acting.scope.recorder
        parent = _operation.get()
        if parent is not None and parent.around.scope is not acting.scope:
            parent = None
        name = str(getattr(data, "name", None) or "")
        operation = begin(kind, name, acting, parent, _handed.get(recorder))
        opened = _Open(operation, is_current=is_current)
        opened.root = root
        if operation.inside is not operation.around:
            recorder.expect(_key(operation), lambda: _record(operation, End(SpanStatus.UNSET)))
        return opened
    except Exception as error:
        _damage(recorder, error)
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
        _record(operation, end)
        if operation.kind in _MAY_BYPASS:
            _record_bypassing(operation, data, end)
        if operation.kind is OperationKind.HANDOFF:
            known = _handed.setdefault(recorder, {})
            hand_over(operation, data.from_agent or "", data.to_agent or "", known)
        if opened.root is not None:
            opened.root.close(error or (end.message if end.status is SpanStatus.ERROR else None))
    except Exception as error:
        _damage(recorder, error)


def _record(operation: Operation, end: End) -> None:
    """Add the span, once."""
    recorder = operation.around.scope.recorder
    if operation.inside is operation.around or not recorder.settle(_key(operation)):
        return
    span = span_of(operation, end)
    if span is not None:
        recorder.add(span)


def _record_bypassing(operation: Operation, data: Any, end: End) -> None:
    """Add the call of a model client that does not use the OpenAI SDK: structure, no tokens."""
    if operation.asked:
        return
    model = getattr(data, "model", None)
    said = getattr(data, "response", None)
    answer = {} if said is None else said.model_dump(mode="json", warnings=False)
    request = {"model": model or answer.get("model") or ""}
    given = getattr(data, "input", None)
    if given is not None:
        request["messages" if operation.kind is OperationKind.GENERATION else "input"] = given
    answer = answer or _completion(getattr(data, "output", None), data.usage)
    span = bypassing_call(operation, request, answer, end)
    if span is not None:
        operation.around.scope.recorder.add(span)


def _completion(output: Any, usage: Any) -> dict[str, Any]:
    """A chat completion of what the SDK's span tells of an answer."""
    told = [one for one in output or () if isinstance(one, Mapping)]
    whole = next((one for one in told if "output" in one), None)
    if whole is not None:
        return dict(whole)
    used = usage or {}
    choices = [
        {"index": n, "message": dict(one), "finish_reason": "stop"} for n, one in enumerate(told)
    ]
    counts = {
        "prompt_tokens": used.get("input_tokens"),
        "completion_tokens": used.get("output_tokens"),
    }
    return {"choices": choices, "usage": counts}


def _key(operation: Operation) -> str:
    return f"lightspan_openai_agents {operation.inside.parent_span_id}"


def _ending(operation: Operation, data: Any, reported: Any, error: BaseException | None) -> End:
    attributes = _DESCRIBED.get(operation.kind, _nothing)(operation, data)
    if isinstance(error, GeneratorExit):
        return End(SpanStatus.UNSET, attributes=attributes)
    if error is not None:
        failed = {**attributes, **exception_attributes(error)}
        return End(SpanStatus.ERROR, text_of(error), failed)
    if reported is None:
        return End(attributes=attributes)
    details = reported.get("data") or {}
    told = [str(reported.get("message") or "error"), str(details.get("error") or "")]
    failed = {**attributes, conventions.ERROR_TYPE: f"{operation.kind.name.title()}Error"}
    return End(SpanStatus.ERROR, ": ".join(filter(None, told)), failed)


def _nothing(operation: Operation, data: Any) -> dict[str, Any]:
    return {}


def _tool_said(operation: Operation, data: Any) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if data.input is not None:
        said[conventions.TOOL_CALL_ARGUMENTS] = shown(data.input)
    if data.output is not None:
        said[conventions.TOOL_CALL_RESULT] = shown(data.output)
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


def _damage(recorder: scope.Recorder, error: Exception) -> None:
    """Errors of ours damage the attempt; they never reach the app."""
    recorder.damage(f"lightspan_openai_agents: {type(error).__name__}: {error}")


def _reset(variable: ContextVar[Any], token: Token[Any]) -> None:
    try:
        variable.reset(token)
    except ValueError:  # the token's context is gone: an abandoned generator
        return


# --- the processor --------------------------------------------------------------------------
class LightspanProcessor(TracingProcessor):
    """Tells lightspan which agent is acting: `add_trace_processor(LightspanProcessor())`.

    It hears nothing where tracing is disabled, and it is gone after `set_trace_processors`;
    `instrument()` needs neither. With both nothing is recorded twice.
    """

    def __init__(self) -> None:
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

    def __init__(self, inner: Span[Any]) -> None:
        self._inner = inner
        self._reported: Any = None
        self._open: _Open | None = None
        self._token: Token[_Watched | None] | None = None

    @property
    def inner(self) -> Span[Any]:
        return self._inner

    def start(self, mark_as_current: bool = False) -> None:
        if self._open is None:
            self._open = _begin(self._inner.span_data, is_current=mark_as_current)
        if mark_as_current and self._token is None:
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
        opened, self._open = self._open, None
        if opened is not None:
            _end(opened, self._inner.span_data, self._reported or self._inner.error)
        token, self._token = self._token, None
        if token is not None:
            _reset(_watched, token)

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
            with _lock:
                self._inner = self._inner or self._default()
        return self._inner

    def _default(self) -> TraceProvider:
        setup.GLOBAL_TRACE_PROVIDER = None
        try:
            default = get_trace_provider()
        finally:
            setup.GLOBAL_TRACE_PROVIDER = self
        _exchange_default(default, _silenced)
        return default

    def create_span(
        self, span_data: Any, span_id: str | None = None, parent: Any = None, disabled: bool = False
    ) -> Span[Any]:
        if isinstance(parent, _Watched):
            parent = parent.inner
        span = self.inner.create_span(span_data, span_id, parent, disabled)
        return _Watched(span) if self.on and scope.pushed() is not None else span

    def get_current_span(self) -> Span[Any] | None:
        span, watched = self.inner.get_current_span(), _watched.get()
        return watched if watched is not None and watched.inner is span else span

    def create_trace(self, *args: Any, **options: Any) -> Trace:
        made = self.inner.create_trace(*args, **options)
        current = scope.pushed() if self.on else None
        if current is not None and scope.is_outside(current):
            _watch_trace(made)
        return made

    def get_current_trace(self) -> Trace | None:
        return self.inner.get_current_trace()

    def register_processor(self, processor: TracingProcessor) -> None:
        self.inner.register_processor(_silenced(processor) if self.on else processor)

    def set_processors(self, processors: list[TracingProcessor]) -> None:
        self.inner.set_processors([_silenced(p) for p in processors] if self.on else processors)

    def set_disabled(self, disabled: bool) -> None:
        self.inner.set_disabled(disabled)

    def time_iso(self) -> str:
        return self.inner.time_iso()

    def gen_trace_id(self) -> str:
        return self.inner.gen_trace_id()

    def gen_span_id(self) -> str:
        return self.inner.gen_span_id()

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
def _watch_trace(trace: Trace) -> None:
    """Make the trace an attempt of its own, as far as it is not in one when it starts."""
    watched = _WatchedTrace(trace)
    trace.start = watched.start  # type: ignore[method-assign]
    trace.finish = watched.finish  # type: ignore[method-assign]


class _WatchedTrace:
    """A trace whose runs are one attempt; it behaves as it did."""

    def __init__(self, trace: Trace) -> None:
        self._start, self._finish = trace.start, trace.finish
        self._name = str(trace.name or "")
        self._root: scope.Root | None = None
        self._token: Token[scope.Acting | None] | None = None
        self._handled: BaseException | None = None

    def start(self, mark_as_current: bool = False) -> None:
        self._handled = sys.exception()
        root = scope.open_root(scope.pushed(), self._name) if mark_as_current else None
        if root is not None:
            self._root, self._token = root, scope.set_acting(root.acting)
        self._start(mark_as_current)

    def finish(self, reset_current: bool = False) -> None:
        root, self._root = self._root, None
        if root is not None and self._token is not None:
            scope.reset_acting(self._token)
            raised = sys.exception()
            root.close(None if raised is self._handled else raised)
        self._finish(reset_current)


# --- nothing is uploaded --------------------------------------------------------------------
class _OutsideRollouts(TracingProcessor):
    """The SDK's default processor, which uploads; not what rollouts do.

    A process that serves (`lightspan.connect`) is in no rollout: its traces go where they went.
    """

    def __init__(self, default: TracingProcessor) -> None:
        self.default = default

    def on_trace_start(self, trace: Trace) -> None:
        if not _in_rollout():
            self.default.on_trace_start(trace)

    def on_trace_end(self, trace: Trace) -> None:
        if not _in_rollout():
            self.default.on_trace_end(trace)

    def on_span_start(self, span: Span[Any]) -> None:
        if not _in_rollout():
            self.default.on_span_start(span)

    def on_span_end(self, span: Span[Any]) -> None:
        if not _in_rollout():
            self.default.on_span_end(span)

    def shutdown(self, timeout: float | None = None) -> None:
        if "timeout" in inspect.signature(self.default.shutdown).parameters:
            self.default.shutdown(timeout=timeout)  # type: ignore[call-arg]
        else:
            self.default.shutdown()

    def force_flush(self) -> None:
        self.default.force_flush()


def _in_rollout() -> bool:
    current = scope.pushed()
    if current is None or current.scope.mode is Mode.PRODUCTION:
        return False
    ambient = scope.ambient()
    return ambient is None or current.scope is not ambient.scope


def _silenced(processor: TracingProcessor) -> TracingProcessor:
    default = getattr(processors, "_global_processor", None)
    return _OutsideRollouts(processor) if processor is default else processor


def _restored(processor: TracingProcessor) -> TracingProcessor:
    return processor.default if isinstance(processor, _OutsideRollouts) else processor


def _exchange_default(
    provider: TraceProvider | None, change: Callable[[TracingProcessor], TracingProcessor]
) -> None:
    """Change the processors of the SDK's own provider; others have no default processor."""
    known = getattr(getattr(provider, "_multi_processor", None), "_processors", None)
    if provider is None or known is None:
        return
    changed = [change(processor) for processor in known]
    if any(new is not old for new, old in zip(changed, known, strict=True)):
        provider.set_processors(changed)


# --- the id of a tool call ------------------------------------------------------------------
_MAKER: Final = "from_agent_context"
"""Of `ToolContext`: called once in each tool's span, with the id that the span does not have."""


def _noting(original: Any) -> Any:
    def from_agent_context(cls: Any, *args: Any, **options: Any) -> Any:
        made = original.__get__(None, cls)(*args, **options)
        _note_tool(made)
        return made

    return classmethod(from_agent_context)


def _note_tool(context: Any) -> None:
    operation = _operation.get()
    if operation is None or operation.kind is not OperationKind.TOOL or operation.tool_call_id:
        return
    try:
        operation.tool_call_id = str(context.tool_call_id or "")
        operation.arguments = shown(context.tool_arguments or "")
    except Exception as error:
        _damage(operation.around.scope.recorder, error)


# --- installing -----------------------------------------------------------------------------
_provider: _Provider | None = None
_made_context: Any = None
"""`ToolContext`'s own maker while ours is in its place."""


def instrument() -> Instrumentation:
    """Record every run of the Agents SDK in this process under the names of its agents.

    It may be called before or after agents are built; twice is once. As a context manager
    (`with instrument():`) it is undone at the end of the block.
    """
    with _lock:
        if _is_installed():
            return Instrumentation(None)
        _wrap_provider()
        _wrap_tool_context()
        scope.register_resolver(_resolve)
        recording.hold(__name__)
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument`; the SDK is left as it was, with the processors that the app gave it."""
    global _provider
    recording.release(__name__)
    with _lock:
        scope.unregister_resolver(_resolve)
        _unwrap_tool_context()
        provider, _provider = _provider, None
        if provider is None:
            return
        provider.on = False
        _exchange_default(provider.made, _restored)
        if setup.GLOBAL_TRACE_PROVIDER is provider:
            setup.GLOBAL_TRACE_PROVIDER = provider.made


class Instrumentor(AdapterInstrumentor):
    """What `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)


def _is_installed() -> bool:
    return _provider is not None


def _wrap_provider() -> None:
    global _provider
    inner = setup.GLOBAL_TRACE_PROVIDER
    _exchange_default(inner, _silenced)
    _provider = _Provider(inner)
    set_trace_provider(_provider)


def _wrap_tool_context() -> None:
    global _made_context
    _made_context = vars(ToolContext).get(_MAKER)
    if _made_context is not None:
        setattr(ToolContext, _MAKER, _noting(_made_context))


def _unwrap_tool_context() -> None:
    global _made_context
    if _made_context is not None:
        setattr(ToolContext, _MAKER, _made_context)
        _made_context = None


def _given(acting: scope.Acting) -> scope.Acting:
    """Who is acting, by all other resolvers: no model is asked now, which `_resolve` would note."""
    for resolver in scope.resolvers():
        if resolver is not _resolve:
            acting = resolver(acting) or acting
    return acting


def _resolve(acting: scope.Acting) -> scope.Acting | None:
    """Asked at every model call of the OpenAI SDK, which core records.

    Who acts is pushed, so there is nothing to say. It is noted that this call did not bypass the
    SDK, and seen to that the app has not put another provider in our place.
    """
    operation = _operation.get()
    if operation is not None:
        operation.asked = True
    if setup.GLOBAL_TRACE_PROVIDER is _provider or _provider is None:
        return None
    with _lock:
        replaced = setup.GLOBAL_TRACE_PROVIDER
        if replaced is _provider or _provider is None:
            return None
        _provider.on = False
        _wrap_provider()
    if replaced is not None and replaced.get_current_trace() is not None:
        acting.scope.recorder.damage(
            "lightspan_openai_agents: the app called set_trace_provider() after instrument(), so "
            "it is not known which agent made this call; call instrument() after it"
        )
    return None
