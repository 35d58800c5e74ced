"""Record model calls that only spans tell of, where the user wants it (`content=True`).

Model calls are recorded by whoever makes them: the shim of the SDKs, an adapter. A framework that
asks past both has a span for each call, in one of three dialects (`vocabulary`). In production such
a span becomes a call of its attempt, in the same form, unless the call is recorded already: it was
made inside the span, or the span began while it was under way in the same context. Of two spans of
one call, one inside the other, the inner one is recorded; with a tool or an agent between them they
are two calls. In a rollout nothing of this is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan

from lightspan.capture import context
from lightspan.capture._globals import state
from lightspan.capture.adapter import add_capture_error
from lightspan.capture.context import AgentContext, CallEnd, make_span
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.redaction import bounded_text
from lightspan.schema.spans import Attributes, Span, SpanEvent, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome
from lightspan_otel.agent_names import Role
from lightspan_otel.convert import from_otel
from lightspan_otel.normalize import INPUTS, translated
from lightspan_otel.open_spans import (
    NAME,
    MessageContent,
    OpenSpan,
    inside_of,
    kept_whole,
    open_here,
)

_OF_CALLS: Final = frozenset(
    {
        *(c.OPERATION_NAME, c.PROVIDER_NAME, c.REQUEST_MODEL, c.REQUEST_STREAM, c.REQUEST_SEED),
        *(c.REQUEST_TEMPERATURE, c.REQUEST_TOP_P, c.REQUEST_MAX_TOKENS, c.REQUEST_STOP),
        *(c.REQUEST_CHOICES, c.RESPONSE_ID, c.RESPONSE_MODEL, c.FINISH_REASONS),
        *(c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.INPUT_MESSAGES, c.OUTPUT_MESSAGES),
        *(c.TOOL_DEFINITIONS, c.ERROR_TYPE, c.SERVER_ADDRESS, c.SERVER_PORT),
    }
)
"""What is kept of a call: what the shim says of one. The rest says it again, in other words."""
_OF_OTHERS: Final = {
    SpanKind.TOOL: frozenset({c.TOOL_CALL_ARGUMENTS, c.TOOL_CALL_RESULT}),
    SpanKind.AGENT: frozenset({c.OPERATION_INPUT, c.OPERATION_OUTPUT}),
}
_MAX_OPEN: Final = 8
"""Calls under way that are remembered of a context: some never end."""


class _CallState:
    """Whether a recorded call is under way."""

    def __init__(self) -> None:
        self.is_open = True

    def end(self, is_answered: bool) -> None:
        self.is_open = False


_recorded: Final[ContextVar[tuple[_CallState, ...]]] = ContextVar(
    "lightspan_otel_recorded", default=()
)
"""Calls that the shim or an adapter records, begun in this context."""


# --- who records what -------------------------------------------------------------------------
def note_call(acting: AgentContext) -> CallEnd | None:
    """Note a model call that is recorded (`scope.CallListener`)."""
    _mark(open_here())
    call = _CallState()
    _recorded.set((call, *_recorded.get())[:_MAX_OPEN])
    return call.end


def _mark(notes: Iterable[OpenSpan]) -> None:
    """The call is made inside these spans. What is around a tool or an agent is of another call."""
    for note in notes:
        note.has_call = True
        if note.role in (Role.AGENT, Role.TOOL):
            break


def given(span: ReadableSpan) -> Any:
    """See `processor.Reader`."""
    attributes = span.attributes or {}
    return _loaded(next((attributes[key] for key in INPUTS if key in attributes), None))


def begin(note: OpenSpan, span: ReadableSpan) -> None:
    """See `processor.Reader`."""
    if note.around is None or note.around.scope.mode is not Mode.PRODUCTION:
        return
    note.has_call = any(call.is_open for call in _recorded.get())


def _loaded(text: Any) -> Any:
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# --- what a span says -------------------------------------------------------------------------
def read(note: OpenSpan, span: ReadableSpan) -> None:
    """A span ends: keep what it says. Never raises."""
    around = note.around
    if around is None or around.scope.mode is not Mode.PRODUCTION or note.ids in kept_whole:
        return
    try:
        kind = c.kind_of(span.attributes or {})
        if kind is SpanKind.LLM:
            if not note.has_call:
                _record(note, around, translated(from_otel(span)))
        elif kind in _OF_OTHERS:
            note.said = _said(translated(from_otel(span)), _OF_OTHERS[kind])
    except Exception as error:
        add_capture_error(around.scope.recorder, NAME, error)


def _said(whole: Span, keys: frozenset[str]) -> MessageContent:
    attributes: Attributes = {key: whole.attributes[key] for key in keys & whole.attributes.keys()}
    events = [
        SpanEvent(event.name, event.time_ns, _clean(event.attributes))
        for event in whole.events
        if c.EXCEPTION_TYPE in event.attributes
    ]
    return MessageContent(attributes, whole.status_message, events)


def _clean(attributes: Mapping[str, Any]) -> Attributes:
    """Of an exception: an endpoint's words may quote a key."""
    return {k: bounded_text(v) if isinstance(v, str) else v for k, v in attributes.items()}


def _record(note: OpenSpan, around: AgentContext, whole: Span) -> None:
    """A model call that nobody else recorded; an attempt of its own where nothing is around it."""
    root = None
    if around.scope.is_outside:
        if state.opener is None:
            return
        with inside_of(note.above):
            around, root = context.start_attempt(around, None)
    _mark(note.upwards())
    said = _said(whole, _OF_CALLS)
    failed = whole.status is SpanStatus.ERROR
    known: Attributes = {
        c.AGENT_PATH: around.path,
        c.CALL_ID: around.scope.new_call_id(),
        c.CALL_OUTCOME: str(CallOutcome.ERROR if failed else CallOutcome.OK),
        **said.attributes,
    }
    span = make_span(
        around,
        f"{known[c.OPERATION_NAME]} {known.get(c.REQUEST_MODEL, '')}".rstrip(),
        SpanKind.LLM,
        known,
        span_id=note.span_id,
        start_ns=note.start_ns,
        status=SpanStatus.ERROR if failed else SpanStatus.OK,
        status_message=said.message,
        events=said.events,
    )
    around.scope.recorder.add(span)
    if root is not None:
        root.close()
