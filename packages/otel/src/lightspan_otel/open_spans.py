"""State of open OpenTelemetry spans: the agent in them and the spans around them.

An `OpenSpan` is created when a span begins, in the span's context. So it knows the enclosing span,
and the frames: the agents that were entered so far. Only its span and the spans inside hold a
reference to it. It is skipped if its span has ended or no longer exists.

When the span of an agent or a tool ends, a lightspan span with its name is recorded. Recorded model
calls have such spans as parents.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from lightspan.capture import context
from lightspan.capture._globals import state
from lightspan.capture.adapter import add_capture_error
from lightspan.capture.context import AgentContext, Frame, agent_attributes, make_span
from lightspan.capture.generator_context import current_flow, generator_of
from lightspan.capture.recorder import Recorder
from lightspan.schema import semconv as c
from lightspan.schema.routing import join_path
from lightspan.schema.spans import Attributes, SpanEvent, SpanKind, SpanStatus, now_ns
from lightspan_otel.agent_names import READ, Role, agent_name, role_of, tool_call_id, tool_name
from lightspan_otel.span_kinds import kind_of

if TYPE_CHECKING:
    from opentelemetry.context import Context

NAME: Final = "lightspan_otel"
"""Name of this package in the messages of capture errors."""

_LEAVE_OPEN: Final = frozenset({"openinference.instrumentation.smolagents"})
"""Libraries that leave an agent's span open, and current, when the agent raises. Only the
span's ERROR status shows that the agent has ended."""

_TRACERS: Final = ("opentelemetry.", "lightspan_otel.", "openinference.instrumentation._", "wrapt")
"""Beginnings of the names of modules that begin spans for others."""

_GENERATOR: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

_ATTEMPTS: Final = (Role.AGENT, Role.WORKFLOW)
"""Roles of spans that start an attempt in production, if no span encloses them."""


class Readable(Protocol):
    """The parts of a span that are read."""

    @property
    def name(self) -> str: ...
    @property
    def attributes(self) -> Mapping[str, Any] | None: ...
    @property
    def status(self) -> Status: ...
    @property
    def events(self) -> Sequence[Any]: ...


class MessageContent(NamedTuple):
    """Content of a span, for `otel.instrument(…, content=True)`."""

    attributes: Attributes
    message: str
    """Status message."""
    events: Sequence[SpanEvent]
    """Exceptions."""


class OpenSpan:
    """State of a span that is or was open: its role, its agent and the spans around it.

    Args:
        span: OpenTelemetry's span, held by a weak reference.
        above: state of the enclosing span; None if there is none.
        span_id: id of the lightspan span that is recorded for `span`: 16 hex digits.
        library: name of the instrumentation scope of `span`.
    """

    def __init__(self, span: Readable, above: OpenSpan | None, span_id: str, library: str) -> None:
        self.span_id = span_id
        self.ids: tuple[int, int] | None = None
        """Trace id and span id of the app's span; None for an `IdentitySpan`."""
        self.ended = False
        self.frame: Frame | None = None
        """Frame of the agent; None if the span is no agent, or while the agent's name is unknown.
        """
        self.depth = 0
        """Number of pushed frames when the span began."""
        self.pushed_span_id: str | None = None
        """Id of the innermost pushed span when the span began."""
        self.agent: AgentContext | None = None
        """Agent context in which the span began; None without a scope, and after the span's end."""
        self.role = Role.OTHER
        self.library = library
        self.input: Any = None
        """Input in the span's first attributes; None unless content is recorded."""
        self.content: MessageContent | None = None
        self.has_call = False
        """Whether the model call inside or around the span is recorded by other code."""
        self.start_ns = now_ns()
        self.generator: int | None = None
        """Id of the stack frame of the generator whose body began the span; None if none did."""
        self.flows: weakref.WeakSet[Any] = weakref.WeakSet()
        """Tasks and threads that ran steps of that generator."""
        self._above = above
        self._span = weakref.ref(span)
        self._parent_id: str | None = None
        self._is_repeated = self._is_recorded_elsewhere = False
        self._identity: Attributes | None = None
        self._read: tuple[str, Mapping[str, Any]] = ("", {})
        """Name and identity attributes as last read, because the span may be gone when it is
        recorded."""
        self._expecting: Recorder | None = None
        self._root: context.AttemptHandle | None = None
        self._handled: BaseException | None = None
        self._lock = threading.RLock()

    # --- enclosing spans ------------------------------------------------------------------
    @property
    def above(self) -> OpenSpan | None:
        """The innermost open span around this span; None if there is none.

        References to ended spans are removed. Otherwise spans that begin one after another inside
        an ended span would form an endless chain.
        """
        while self._above is not None and self._above.ended:
            self._above = self._above._above
        return self._above

    def upwards(self) -> Iterator[OpenSpan]:
        """Yield this span, if it is open, and the open spans around it, innermost first."""
        open_span = self if not self.ended else self.above
        while open_span is not None:
            yield open_span
            open_span = open_span.above

    @property
    def is_node(self) -> bool:
        """Whether a lightspan span is recorded for this span: it is an agent or a tool.

        Recorded model calls can only have such spans as parents.
        """
        return self.frame is not None or self.role is Role.TOOL

    @property
    def is_in_call(self) -> bool:
        """Whether an open span of a model call is around this span, with no agent or tool between.

        A call's span of which no attribute says so yet does not count.
        """
        for each in self.upwards():
            span = each._span()
            if each is not self and span is not None:
                if each.role in (Role.AGENT, Role.TOOL):
                    return False
                if kind_of(span.attributes or {}) is SpanKind.LLM:
                    return True
        return False

    @property
    def began_outside(self) -> bool:
        """Whether this span began while no attempt (recorded run of the app) was open."""
        return self.agent is not None and self.agent.scope.is_outside

    def began_in(self, acting: AgentContext) -> bool:
        """Return whether this span began in the attempt of `acting`."""
        agent = self.agent
        return agent is not None and agent.scope.recorder is acting.scope.recorder

    # --- role and agent -------------------------------------------------------------------
    def begin(self) -> None:
        """Start tracking this span in the current context. Never raises."""
        above = self.above  # before the early return: this unlinks ended spans
        current = context.current_context()
        if current is None or is_claimed(self.library):
            return
        self.depth, self.pushed_span_id = len(current.frames), current.parent_span_id
        self._handled = sys.exception()
        recorder = current.scope.recorder
        try:
            generator = _generator_here()
            if generator is not None:
                self.generator = id(generator)
                self.flows.add(current_flow())
            with inside_of(above):
                self.agent = context.resolve_agent(current)
            recorder = self.agent.scope.recorder
            self.settle(may_guess=False)
            if self.generator is not None and self.role in _ATTEMPTS:
                _by_generator[self.generator] = self
            if self.began_outside:
                self.open()
            self.start_ns = now_ns()  # not before the start of the attempt that it may be
        except Exception as error:
            add_capture_error(recorder, NAME, error)

    def settle(self, *, may_guess: bool) -> None:
        """Determine the role, agent and parent of this span if they are unknown.

        Args:
            may_guess: whether to derive the agent's name from the span's name (see `agent_name`).
        """
        span, agent = self._span(), self.agent
        if span is None or agent is None:
            return
        if self.frame is None and not self._is_repeated:
            name, attributes = self._read = span.name, _identity(span)
            if self.role not in (Role.AGENT, Role.TOOL):
                self.role = role_of(name, attributes)
            if self.role is Role.AGENT:
                self._name(agent_name(name, attributes, may_guess=may_guess), agent)
        recorder = agent.scope.recorder
        if self.is_node and self._expecting is not recorder:
            self._expecting = recorder
            recorder.register_pending(self._key, self._abandon)
            self._watch()

    def _name(self, name: str | None, agent: AgentContext) -> None:
        if name is None:
            return
        agents = (one for one in self.upwards() if one is not self and one.frame is not None)
        outer = next((one for one in agents if one.began_in(agent)), None)
        self._parent_id = agent.parent_span_id
        if outer is not None and outer.frame is not None and outer.frame.name == name:
            # Nothing is between them: one agent, for which its framework emits two spans.
            self._is_repeated = self._parent_id in (outer.span_id, outer._parent_id)
        if not self._is_repeated:
            self.frame = Frame(name, self.span_id)
            open_agents.add(self)

    def rebase(self, acting: AgentContext) -> None:
        """Move this span, which began while no attempt was open, into the attempt of `acting`."""
        self.agent = AgentContext(acting.scope, acting.frames, acting.parent_span_id)

    # --- in production --------------------------------------------------------------------
    def open(self) -> None:
        """Start an attempt with this span, if it began while no attempt was open.

        This is done only if the span is of a kind that starts attempts, such as an agent.
        """
        with self._lock:
            agent = self.agent
            if agent is None or not agent.scope.is_outside or state.attempt_factory is None:
                return
            if self.role not in _ATTEMPTS or self._root is not None or self.ended:
                return
            span = self._span()
            label = self.frame.name if self.frame is not None else getattr(span, "name", "")
            with inside_of(self.above):
                self.agent, self._root = context.start_attempt(agent, label, self.input)
            self._watch()
        self.settle(may_guess=False)

    # --- end of the span ------------------------------------------------------------------
    def end(self, span: Readable) -> None:
        """Stop tracking this span, and record it if it is an agent or a tool. Never raises.

        Args:
            span: the ended span, with all attributes.
        """
        agent = self.agent
        if agent is None:
            self.ended = True
            return
        raised = sys.exception()
        error = None if raised is self._handled else raised
        is_closed_early = isinstance(error, GeneratorExit)
        failed: str | None = None
        try:
            failed = failure_of(span)
            if failed is None and error and not is_closed_early and _is_failure(span, error):
                failed = type(error).__qualname__
            self.settle(may_guess=True)
            status = SpanStatus.ERROR if failed is not None else SpanStatus.OK
            self._finish(SpanStatus.UNSET if is_closed_early else status, failed)
        except Exception as failure:
            add_capture_error(agent.scope.recorder, NAME, failure)
        finally:
            self._leave(GeneratorExit() if is_closed_early else failed)  # without a stack

    def _finish(self, status: SpanStatus, error: str | None = None) -> None:
        """Record this span once, if it is an agent or a tool.

        Args:
            status: the final status.
            error: type name of the error; None for no error. The error's message is not recorded,
                because it may quote a prompt.
        """
        agent = self.agent
        if agent is None or not self.is_node:
            return
        name, kind, identity = self._agent(agent) if self.frame is not None else self._tool()
        self._identity = identity
        if not agent.scope.recorder.resolve_pending(self._key):
            return
        if self._is_recorded_elsewhere or self.ids in recorded_whole:
            return
        content = self.content or MessageContent({}, "", ())
        span = make_span(
            agent,
            name,
            kind,
            {**content.attributes, **identity, **({} if error is None else {c.ERROR_TYPE: error})},
            span_id=self.span_id,
            start_ns=self.start_ns,
            status=status,
            status_message=content.message,
            events=list(content.events),
        )
        agent.scope.recorder.add(span)

    def end_if_failed(self) -> None:
        """Stop tracking this span if it failed, and its library does not end failed spans.

        These libraries are listed in `_LEAVE_OPEN`.
        """
        span = self._span() if self.library in _LEAVE_OPEN and self.agent is not None else None
        failed = None if span is None else failure_of(span)
        if failed is not None:
            self.settle(may_guess=True)
            self._finish(SpanStatus.ERROR, failed)
            self._leave(failed)

    def mark_recorded_elsewhere(self) -> Attributes:
        """Leave the recording of this span to `LightspanSpanProcessor`.

        Returns:
            The attributes that name the agent or the tool; empty if the span is neither.
        """
        self._is_recorded_elsewhere = True
        self.settle(may_guess=True)
        if self._identity is None and self.agent is not None and self.frame is not None:
            return self._agent(self.agent)[2]
        return self._identity or {}

    def _agent(self, agent: AgentContext) -> tuple[str, SpanKind, Attributes]:
        assert self.frame is not None
        name = self.frame.name
        names = (frame.name for frame in (*agent.frames, self.frame))
        attributes = {**agent_attributes(name, agent.frames), c.AGENT_PATH: join_path(names)}
        return f"invoke_agent {name}", SpanKind.AGENT, attributes

    def _tool(self) -> tuple[str, SpanKind, Attributes]:
        name, attributes = self._read
        name = tool_name(name, attributes)
        identity: Attributes = {
            c.OPERATION_NAME: "execute_tool",
            c.TOOL_NAME: name,
            c.OPENINFERENCE_KIND: "TOOL",
        }
        call_id = tool_call_id(attributes)
        if call_id is not None:
            identity[c.TOOL_CALL_ID] = call_id
        return f"execute_tool {name}", SpanKind.TOOL, identity

    def _abandon(self) -> None:
        """Stop tracking this span, whose end is unknown.

        Either its attempt has ended, or the span object was deleted.
        """
        self.end_if_failed()
        self._finish(SpanStatus.UNSET)
        self._leave(None)

    def _leave(self, error: BaseException | str | None) -> None:
        root, self._root = self._root, None
        self.ended, self.agent, self._handled, self._expecting = True, None, None, None
        open_agents.discard(self)
        if self.generator is not None and _by_generator.get(self.generator) is self:
            del _by_generator[self.generator]
            for outer in self.upwards():
                if outer.generator == self.generator and outer.role in _ATTEMPTS:
                    _by_generator[self.generator] = outer
                    break
        if root is not None:
            root.close(error)

    def _watch(self) -> None:
        span = self._span()
        if span is not None:
            weakref.finalize(span, self._abandon).atexit = False

    @property
    def _key(self) -> str:
        return f"{NAME} {self.span_id}"


def _identity(span: Readable) -> Mapping[str, Any]:
    attributes = span.attributes or {}
    return {key: attributes[key] for key in READ if key in attributes}


def failure_of(span: Readable) -> str | None:
    """Return the type of a span's error, or `error` if it is unknown; None for no error."""
    if span.status.status_code is not StatusCode.ERROR:
        return None
    return next(iter(_error_types(span)), "error")


def _error_types(span: Readable) -> list[str]:
    error_type = (span.attributes or {}).get(c.ERROR_TYPE)
    kinds = [(event.attributes or {}).get(c.EXCEPTION_TYPE) for event in span.events]
    return [str(kind) for kind in (error_type, *kinds) if kind]


def _is_failure(span: Readable, error: BaseException) -> bool:
    """Return whether `error` made a span fail whose status is not ERROR.

    The status is not enough. The SDK does not set it for cancellations, and OpenInference sets OK
    although it records the exception. An exception that only ends a stream is no failure.

    Args:
        span: the span.
        error: the exception that ended the span.
    """
    name = type(error).__qualname__
    recorded = any(kind.endswith(name) for kind in _error_types(span))
    return recorded or not isinstance(error, Exception)


def is_claimed(library: str) -> bool:
    """Return whether an adapter records the agents of this OpenTelemetry scope itself.

    Spans of such a scope are ignored (`lightspan.capture.adapter.claim_scope`).
    """
    return any(library in scopes for scopes in state.claims.values())


# --- look-up of states ----------------------------------------------------------------------
_open_spans: Final[weakref.WeakKeyDictionary[Any, OpenSpan]] = weakref.WeakKeyDictionary()
_by_ids: Final[weakref.WeakValueDictionary[tuple[int, int], OpenSpan]] = (
    weakref.WeakValueDictionary()
)
"""(trace id, span id) → state of the span; finds the state for a copy of the span."""

open_agents: Final[weakref.WeakSet[OpenSpan]] = weakref.WeakSet()
"""Open agents in any context."""

recorded_whole: Final[set[tuple[int, int]]] = set()
"""Open spans that `LightspanSpanProcessor` records with all attributes."""

_by_generator: Final[weakref.WeakValueDictionary[int, OpenSpan]] = weakref.WeakValueDictionary()
"""Id of a generator's stack frame → state of the last span that began in its body."""

_Origin = OpenSpan | None | str
_HERE: Final = "here"
_inside: Final[ContextVar[_Origin]] = ContextVar("lightspan_otel_inside", default=_HERE)
"""Span from which agents are resolved; `_HERE` for the current span."""
submitted_in: Final[ContextVar[OpenSpan | None]] = ContextVar(
    "lightspan_otel_submitted", default=None
)
"""Span in which the work of the current thread was submitted to a pool (`pools`)."""


def register(span: trace.Span, open_span: OpenSpan) -> None:
    """Register the state of a span for the span's lifetime."""
    span_context = span.get_span_context()
    open_span.ids = (span_context.trace_id, span_context.span_id)
    _open_spans[span] = _by_ids[open_span.ids] = open_span


def open_span_of(span: Any) -> OpenSpan | None:
    """Return the state of a span or of a copy of it; None if it is not tracked."""
    span_context = span.get_span_context()
    for place in (span, span_context):
        own = getattr(place, "open_span", None)
        if isinstance(own, OpenSpan):
            return own
    if span_context is None:
        return None
    return open_span_by_ids(span_context.trace_id, span_context.span_id)


def open_span_by_ids(trace_id: int, span_id: int) -> OpenSpan | None:
    """Return the state of the span with these ids; None if it is not tracked."""
    return _by_ids.get((trace_id, span_id))


def open_span_in(context: Context | None = None) -> OpenSpan | None:
    """Return the state of the innermost tracked span around the caller; None if there is none.

    Usually this is the current span, but generators need special treatment. An instrumentation may
    make an agent's span current in a generator's first step. A server may run the next steps in
    other threads, where that span is not current. So the agents of generators on the call stack are
    used if the current span is not inside them. Between the steps, the span may still be current in
    the thread, although the generator is paused. Then it is skipped. In work of a pool without a
    current span, the span that submitted the work is used (`pools`).

    Args:
        context: OpenTelemetry's context with the current span; None for the current context.
    """
    flow, on_stack, held = current_flow(), set[int](), list[OpenSpan]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_flags & _GENERATOR:
            on_stack.add(id(frame))
            held += _agents_of(frame)
        frame = frame.f_back
    for each in held:
        each.flows.add(flow)
    current = open_span_of(trace.get_current_span(context))
    around = [] if current is None else list(current.upwards())
    for place, each in reversed(list(enumerate(around))):
        if each.generator is not None and each.generator not in on_stack and flow in each.flows:
            around = around[place + 1 :]
            break
    if held and held[0] not in around:
        return held[0]
    if around:
        return around[0]
    submitter = submitted_in.get()
    return submitter if submitter is None or not submitter.ended else submitter.above


def _agents_of(generator: FrameType) -> Iterator[OpenSpan]:
    """Yield the open agents that a generator runs.

    They are the agent whose span began in the generator, and those whose spans its variables
    contain.
    """
    own = _by_generator.get(id(generator))
    if own is not None and not own.ended and own.role in _ATTEMPTS:
        yield own
    for value in generator.f_locals.values():
        span = open_span_of(value) if _is_span(type(value)) else None
        if span is not None and not span.ended and span.role in _ATTEMPTS:
            yield span


def _is_span(kind: type) -> bool:
    """Return whether `kind` is a class of spans, or of OpenInference's proxies of spans.

    `isinstance` is not used. On proxies of other kinds, such as a web framework's lazily loaded
    user, it would load the object.
    """
    return issubclass(kind, trace.Span) or kind.__name__ == "OpenInferenceSpan"


def _generator_here() -> FrameType | None:
    """Return the frame of the generator whose code begins a span.

    The result is None if the span does not begin in a generator.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_TRACERS):
        frame = frame.f_back
    return None if frame is None else generator_of(frame)


@contextmanager
def inside_of(open_span: OpenSpan | None) -> Iterator[None]:
    """Take `open_span`, not the current span, as the span around the code in the block.

    Args:
        open_span: state of the span; None for no span around the block.
    """
    token = _inside.set(open_span)
    try:
        yield
    finally:
        _inside.reset(token)


def open_here() -> Sequence[OpenSpan]:
    """Return the open spans around the caller, innermost first."""
    origin = _inside.get()
    open_span = open_span_in() if isinstance(origin, str) else origin
    if open_span is None:
        return ()
    for each in open_span.upwards():
        each.end_if_failed()
    return list(open_span.upwards())
