"""What is known of the spans that are open: whose they are, what is around them, who acts in them.

A note is taken when a span begins, in the context in which it begins, so it knows what was pushed
there and which span is around it. Nobody keeps it but its span and the spans inside it; one
whose span is gone or has ended is passed over. What an agent's or a tool's span says of identity is
recorded when it ends, as a span of ours, so that no call has a parent that nobody recorded.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from lightspan.capture import context
from lightspan.capture._globals import state
from lightspan.capture.adapter import add_capture_error, is_claimed
from lightspan.capture.context import AgentContext, Frame, agent_attributes, make_span
from lightspan.capture.recorder import Recorder
from lightspan.schema import semconv as c
from lightspan.schema.routing import join_path
from lightspan.schema.spans import Attributes, SpanEvent, SpanKind, SpanStatus, now_ns
from lightspan_otel.agent_names import READ, Role, agent_name, role_of, tool_call_id, tool_name

NAME: Final = "lightspan_otel"
"""Who is to blame where an attempt is damaged."""

_LEFT_OPEN: Final = frozenset({"openinference.instrumentation.smolagents"})
"""Libraries that never end an agent's span when it raises, and leave it the current one. That it
has failed is all that is said of its end."""

_ATTEMPTS: Final = (Role.AGENT, Role.WORKFLOW)
"""What is an attempt of its own in production, where nothing is around it."""


class Readable(Protocol):
    """Of a span, what is read."""

    @property
    def name(self) -> str:
        """Its name, by now."""
        ...

    @property
    def attributes(self) -> Mapping[str, Any] | None:
        """Those that it has by now."""
        ...

    @property
    def status(self) -> Status:
        """How it ended, as far as that is known."""
        ...

    @property
    def events(self) -> Sequence[Any]:
        """What happened in it."""
        ...


class MessageContent(NamedTuple):
    """What a span says beside identity, where that is wanted (`hearsay`)."""

    attributes: Attributes
    message: str
    """Of its status."""
    events: Sequence[SpanEvent]
    """Its exceptions."""


class OpenSpan:
    """A span that is open, or was.

    Args:
        span: it is not kept alive.
        above: the note of the span around it.
        span_id: 16 hex digits, of the span that is recorded of it.
        library: the name of its instrumentation scope.
    """

    def __init__(self, span: Readable, above: OpenSpan | None, span_id: str, library: str) -> None:
        self.span_id = span_id
        self.ids: tuple[int, int] | None = None
        """Trace and span, where it is one of the app's."""
        self.ended = False
        self.frame: Frame | None = None
        """Of the agent that it is, from when its name is known on."""
        self.depth = 0
        """How many frames were pushed when it began."""
        self.beneath: str | None = None
        """The innermost span that was pushed then."""
        self.around: AgentContext | None = None
        """Who acted when it began; None where no scope was open, and once it has ended."""
        self.role = Role.OTHER
        self.library = library
        self.given: Any = None
        """What the run was given that it is, where that is wanted."""
        self.said: MessageContent | None = None
        self.has_call = False
        """A model call that it may tell of is recorded by somebody else."""
        self.start_ns = now_ns()
        self._above = above
        self._span = weakref.ref(span)
        self._parent_id: str | None = None
        self._is_repeated = self._is_elsewhere = False
        self._told: Attributes | None = None
        self._read: tuple[str, Mapping[str, Any]] = ("", {})
        """Name and identity, as they were read last: the span may be gone."""
        self._expecting: Recorder | None = None
        self._root: context.AttemptHandle | None = None
        self._handled: BaseException | None = None
        self._lock = threading.RLock()

    # --- its place ------------------------------------------------------------------------
    @property
    def above(self) -> OpenSpan | None:
        """The innermost open span around it. What has ended is left out for good, or a context
        whose current span has ended would have spans behind one another without end."""
        while self._above is not None and self._above.ended:
            self._above = self._above._above
        return self._above

    def upwards(self) -> Iterator[OpenSpan]:
        """It, if it is open, and the open spans around it: the innermost first."""
        note = self if not self.ended else self.above
        while note is not None:
            yield note
            note = note.above

    @property
    def is_node(self) -> bool:
        """Whether a span of ours stands for it, which may be a parent."""
        return self.frame is not None or self.role is Role.TOOL

    @property
    def began_outside(self) -> bool:
        """Whether it is not known to be in an attempt."""
        return self.around is not None and self.around.scope.is_outside

    def began_in(self, acting: AgentContext) -> bool:
        """Whether it began in the attempt of whoever acts."""
        around = self.around
        return around is not None and around.scope.recorder is acting.scope.recorder

    # --- what it is -----------------------------------------------------------------------
    def begin(self) -> None:
        """It begins now, here. Never raises."""
        above = self.above  # first of all: it forgets those that have ended, where nothing is read
        current = context.current_context()
        if current is None or is_claimed(self.library):
            return
        self.depth, self.beneath = len(current.frames), current.parent_span_id
        self._handled = sys.exception()
        recorder = current.scope.recorder
        try:
            with inside_of(above):
                self.around = context.resolve_agent(current)
            recorder = self.around.scope.recorder
            self.settle(may_guess=False)
            if self.began_outside:
                self.open()
            self.start_ns = now_ns()  # not before the attempt that it may be
        except Exception as error:
            add_capture_error(recorder, NAME, error)

    def settle(self, *, may_guess: bool) -> None:
        """See what it is and who acts in it, unless that is known; it does not change any more.

        Args:
            may_guess: see `agent_name`.
        """
        span, around = self._span(), self.around
        if span is None or around is None:
            return
        if self.frame is None and not self._is_repeated:
            name, attributes = self._read = span.name, _identity(span)
            if self.role not in (Role.AGENT, Role.TOOL):
                self.role = role_of(name, attributes)
            if self.role is Role.AGENT:
                self._name(agent_name(name, attributes, may_guess=may_guess), around)
        recorder = around.scope.recorder
        if self.is_node and self._expecting is not recorder:
            self._expecting = recorder
            recorder.register_pending(self._key, self._give_up)
            self._watch()

    def _name(self, name: str | None, around: AgentContext) -> None:
        if name is None:
            return
        agents = (one for one in self.upwards() if one is not self and one.frame is not None)
        outer = next((one for one in agents if one.began_in(around)), None)
        self._parent_id = around.parent_span_id
        if outer is not None and outer.frame is not None and outer.frame.name == name:
            # Nothing is between them: one agent, whose framework tells of it twice.
            self._is_repeated = self._parent_id in (outer.span_id, outer._parent_id)
        if not self._is_repeated:
            self.frame = Frame(name, self.span_id)
            open_agents.add(self)

    def rebase(self, acting: AgentContext) -> None:
        """It began outside every attempt, and turned out to be in one: `acting` is around it."""
        self.around = AgentContext(acting.scope, acting.frames, acting.parent_span_id)

    # --- in production --------------------------------------------------------------------
    def open(self) -> None:
        """Make it an attempt of its own if it began outside, and what it is may be one."""
        with self._lock:
            around = self.around
            if around is None or not around.scope.is_outside or state.attempt_factory is None:
                return
            if self.role not in _ATTEMPTS or self._root is not None or self.ended:
                return
            span = self._span()
            label = self.frame.name if self.frame is not None else getattr(span, "name", "")
            with inside_of(self.above):
                self.around, self._root = context.start_attempt(around, label, self.given)
            self._watch()
        self.settle(may_guess=False)

    # --- its end --------------------------------------------------------------------------
    def end(self, span: Readable) -> None:
        """It ends now. Never raises.

        Args:
            span: it, complete.
        """
        around = self.around
        if around is None:
            self.ended = True
            return
        raised = sys.exception()
        error = None if raised is self._handled else raised
        is_left = isinstance(error, GeneratorExit)
        failed: str | None = None
        try:
            failed = failure_of(span)
            if failed is None and error is not None and not is_left and _is_failure(span, error):
                failed = type(error).__qualname__
            self.settle(may_guess=True)
            status = SpanStatus.ERROR if failed is not None else SpanStatus.OK
            self._finish(SpanStatus.UNSET if is_left else status, failed)
        except Exception as failure:
            add_capture_error(around.scope.recorder, NAME, failure)
        finally:
            self._leave(GeneratorExit() if is_left else failed)  # one without a stack

    def _finish(self, status: SpanStatus, error: str | None = None) -> None:
        """Record it, once.

        Args:
            status: how it ended.
            error: the kind of what it failed with. Its words may quote a prompt: they are not kept.
        """
        around = self.around
        if around is None or not self.is_node:
            return
        name, kind, known = self._agent(around) if self.frame is not None else self._tool()
        self._told = known
        if not around.scope.recorder.resolve_pending(self._key):
            return
        if self._is_elsewhere or self.ids in kept_whole:
            return
        said = self.said or MessageContent({}, "", ())
        span = make_span(
            around,
            name,
            kind,
            {**said.attributes, **known, **({} if error is None else {c.ERROR_TYPE: error})},
            span_id=self.span_id,
            start_ns=self.start_ns,
            status=status,
            status_message=said.message,
            events=list(said.events),
        )
        around.scope.recorder.add(span)

    def end_if_left(self) -> None:
        """End it if it has, though its library does not say so."""
        span = self._span() if self.library in _LEFT_OPEN and self.around is not None else None
        failed = None if span is None else failure_of(span)
        if failed is not None:
            self.settle(may_guess=True)
            self._finish(SpanStatus.ERROR, failed)
            self._leave(failed)

    def told_elsewhere(self) -> Attributes:
        """Somebody else records it, whole; returns what it says of who acts."""
        self._is_elsewhere = True
        self.settle(may_guess=True)
        if self._told is None and self.around is not None and self.frame is not None:
            return self._agent(self.around)[2]
        return self._told or {}

    def _agent(self, around: AgentContext) -> tuple[str, SpanKind, Attributes]:
        assert self.frame is not None
        name = self.frame.name
        names = (frame.name for frame in (*around.frames, self.frame))
        attributes = {**agent_attributes(name, around.frames), c.AGENT_PATH: join_path(names)}
        return f"invoke_agent {name}", SpanKind.AGENT, attributes

    def _tool(self) -> tuple[str, SpanKind, Attributes]:
        name, attributes = self._read
        name = tool_name(name, attributes)
        known: Attributes = {
            c.OPERATION_NAME: "execute_tool",
            c.TOOL_NAME: name,
            c.OPENINFERENCE_KIND: "TOOL",
        }
        call_id = tool_call_id(attributes)
        if call_id is not None:
            known[c.TOOL_CALL_ID] = call_id
        return f"execute_tool {name}", SpanKind.TOOL, known

    def _give_up(self) -> None:
        """The attempt ends, or the span is gone: nobody will say how it ended."""
        self.end_if_left()
        self._finish(SpanStatus.UNSET)
        self._leave(None)

    def _leave(self, error: BaseException | str | None) -> None:
        root, self._root = self._root, None
        self.ended, self.around, self._handled, self._expecting = True, None, None, None
        open_agents.discard(self)
        if root is not None:
            root.close(error)

    def _watch(self) -> None:
        span = self._span()
        if span is not None:
            weakref.finalize(span, self._give_up).atexit = False

    @property
    def _key(self) -> str:
        return f"{NAME} {self.span_id}"


def _identity(span: Readable) -> Mapping[str, Any]:
    attributes = span.attributes or {}
    return {key: attributes[key] for key in READ if key in attributes}


def failure_of(span: Readable) -> str | None:
    """The kind of a span's error, not its words; None if it has none."""
    if span.status.status_code is not StatusCode.ERROR:
        return None
    return next(iter(_error_types(span)), "error")


def _error_types(span: Readable) -> list[str]:
    named = (span.attributes or {}).get(c.ERROR_TYPE)
    kinds = [(event.attributes or {}).get(c.EXCEPTION_TYPE) for event in span.events]
    return [str(kind) for kind in (named, *kinds) if kind]


def _is_failure(span: Readable, error: BaseException) -> bool:
    """Whether an error that passes through a span without the status ERROR is its failure: the SDK
    does not record a cancellation, and OpenInference sets OK though it recorded the exception. The
    end of a stream is an exception, too, and none."""
    name = type(error).__qualname__
    recorded = any(kind.endswith(name) for kind in _error_types(span))
    return recorded or not isinstance(error, Exception)


# --- finding them ---------------------------------------------------------------------------
_notes: Final[weakref.WeakKeyDictionary[Any, OpenSpan]] = weakref.WeakKeyDictionary()
_by_ids: Final[weakref.WeakValueDictionary[tuple[int, int], OpenSpan]] = (
    weakref.WeakValueDictionary()
)
"""Trace and span → note, for copies of a span, which are other objects."""

open_agents: Final[weakref.WeakSet[OpenSpan]] = weakref.WeakSet()
"""Those that act now, in any context."""

kept_whole: Final[set[tuple[int, int]]] = set()
"""Open spans of which somebody else records all that they say (`LightspanSpanProcessor`)."""

_Chosen = OpenSpan | None | str
_HERE: Final = "here"
_inside: Final[ContextVar[_Chosen]] = ContextVar("lightspan_otel_inside", default=_HERE)
"""The span that is looked from, where it is not the current one."""


def keep(span: trace.Span, note: OpenSpan) -> None:
    """Keep the note as long as there is the span."""
    span_context = span.get_span_context()
    note.ids = (span_context.trace_id, span_context.span_id)
    _notes[span] = _by_ids[note.ids] = note


def note_of(span: Any) -> OpenSpan | None:
    """The note of a span, or of a copy of it; None if none was taken."""
    span_context = span.get_span_context()
    for place in (span, span_context):
        own = getattr(place, "note", None)
        if isinstance(own, OpenSpan):
            return own
    return (
        None if span_context is None else note_by_ids(span_context.trace_id, span_context.span_id)
    )


def note_by_ids(trace_id: int, span_id: int) -> OpenSpan | None:
    """The note of the span with these ids."""
    return _by_ids.get((trace_id, span_id))


@contextmanager
def inside_of(note: OpenSpan | None) -> Iterator[None]:
    """Look from this span, in place of the current one."""
    token = _inside.set(note)
    try:
        yield
    finally:
        _inside.reset(token)


def open_here() -> Sequence[OpenSpan]:
    """The open spans around whoever asks, the innermost first."""
    chosen = _inside.get()
    note = note_of(trace.get_current_span()) if isinstance(chosen, str) else chosen
    if note is None:
        return ()
    for each in note.upwards():
        each.end_if_left()
    return list(note.upwards())
