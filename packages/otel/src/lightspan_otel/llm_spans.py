"""Record model calls known only from spans, if the user opts in (`content=True`).

SDK patches and adapters record the model calls that pass through them. A framework that uses
neither emits a span per call, with attributes that `normalize` translates. In production such a
span is recorded as a call of its attempt, unless the call is recorded already.

The call of a span is recorded already in two cases: a call was recorded inside the span, or a
recorded call was open in the same context when the span began. If two libraries make nested spans
of one call, only the inner span is recorded. Nested spans with a tool or an agent between them are
two calls. Nothing is recorded from spans in rollouts.
"""

from __future__ import annotations

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
from lightspan_otel.normalize import INPUTS, loaded, normalized
from lightspan_otel.open_spans import (
    NAME,
    MessageContent,
    OpenSpan,
    inside_of,
    open_here,
    recorded_whole,
)
from lightspan_otel.span_kind import kind_of

_CALL_ATTRIBUTES: Final = frozenset(
    {
        *(c.OPERATION_NAME, c.PROVIDER_NAME, c.REQUEST_MODEL, c.REQUEST_STREAM, c.REQUEST_SEED),
        *(c.REQUEST_TEMPERATURE, c.REQUEST_TOP_P, c.REQUEST_MAX_TOKENS, c.REQUEST_STOP),
        *(c.REQUEST_CHOICES, c.RESPONSE_ID, c.RESPONSE_MODEL, c.FINISH_REASONS),
        *(c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.INPUT_MESSAGES, c.OUTPUT_MESSAGES),
        *(c.TOOL_DEFINITIONS, c.ERROR_TYPE, c.SERVER_ADDRESS, c.SERVER_PORT),
    }
)
"""Attributes that are recorded of a call, as SDK patches do. Other attributes repeat them."""
_CONTENT_ATTRIBUTES: Final = {
    SpanKind.TOOL: frozenset({c.TOOL_CALL_ARGUMENTS, c.TOOL_CALL_RESULT}),
    SpanKind.AGENT: frozenset({c.OPERATION_INPUT, c.OPERATION_OUTPUT}),
}
_MAX_OPEN: Final = 8
"""Maximum number of open calls remembered per context, because some calls never end."""


class _CallState:
    """A recorded call, with the flag whether it is still open."""

    def __init__(self) -> None:
        self.is_open = True

    def end(self, is_answered: bool) -> None:
        self.is_open = False


_recorded: Final[ContextVar[tuple[_CallState, ...]]] = ContextVar(
    "lightspan_otel_recorded", default=()
)
"""Calls begun in this context that an SDK patch or an adapter records."""


def note_call(acting: AgentContext) -> CallEnd | None:
    """Mark the spans around a beginning model call as having a call that is recorded elsewhere.

    This is a `CallListener`: it runs when a recorded call begins, and returns a function to call at
    the call's end.
    """
    _mark(open_here())
    call = _CallState()
    _recorded.set((call, *_recorded.get())[:_MAX_OPEN])
    return call.end


def _mark(spans: Iterable[OpenSpan]) -> None:
    """Set `has_call` of the spans up to and including the first agent or tool.

    `spans` are nested spans, innermost first. Spans outside of this agent or tool belong to another
    call.
    """
    for open_span in spans:
        open_span.has_call = True
        if open_span.role in (Role.AGENT, Role.TOOL):
            break


def input_of(span: ReadableSpan) -> Any:
    """Return the decoded input in a span's attributes; None if the span has no input yet."""
    attributes = span.attributes or {}
    return loaded(next((attributes[key] for key in INPUTS if key in attributes), None))


def begin(open_span: OpenSpan) -> None:
    """Set `open_span.has_call` to whether a recorded call is open as the span begins."""
    if open_span.agent is None or open_span.agent.scope.mode is not Mode.PRODUCTION:
        return
    open_span.has_call = any(call.is_open for call in _recorded.get())


def read(open_span: OpenSpan, span: ReadableSpan) -> None:
    """Record an ended span if it is a model call that nothing else recorded.

    If the span is a tool or an agent, its content is kept in `open_span`. Never raises.
    """
    agent = open_span.agent
    if agent is None or agent.scope.mode is not Mode.PRODUCTION or open_span.ids in recorded_whole:
        return
    try:
        kind = kind_of(span.attributes or {})
        if kind is SpanKind.LLM:
            if not open_span.has_call:
                _record(open_span, agent, normalized(from_otel(span)))
        elif kind in _CONTENT_ATTRIBUTES:
            open_span.content = _content(normalized(from_otel(span)), _CONTENT_ATTRIBUTES[kind])
    except Exception as error:
        add_capture_error(agent.scope.recorder, NAME, error)


def _content(span: Span, keys: frozenset[str]) -> MessageContent:
    attributes: Attributes = {key: span.attributes[key] for key in keys & span.attributes.keys()}
    events = [
        SpanEvent(event.name, event.time_ns, _clean(event.attributes))
        for event in span.events
        if c.EXCEPTION_TYPE in event.attributes
    ]
    return MessageContent(attributes, span.status_message, events)


def _clean(attributes: Mapping[str, Any]) -> Attributes:
    """Redact the attributes of an exception, because its message may quote an API key."""
    return {k: bounded_text(v) if isinstance(v, str) else v for k, v in attributes.items()}


def _record(open_span: OpenSpan, agent: AgentContext, span: Span) -> None:
    """Record a model call that nothing else recorded; open an attempt for it if there is none."""
    root = None
    if agent.scope.is_outside:
        if state.attempt_factory is None:
            return
        with inside_of(open_span.above):
            agent, root = context.start_attempt(agent, None)
    _mark(open_span.upwards())
    content = _content(span, _CALL_ATTRIBUTES)
    failed = span.status is SpanStatus.ERROR
    attributes: Attributes = {
        c.AGENT_PATH: agent.path,
        c.CALL_ID: agent.scope.recorder.new_call_id(),
        c.CALL_OUTCOME: str(CallOutcome.ERROR if failed else CallOutcome.OK),
        **content.attributes,
    }
    recorded = make_span(
        agent,
        f"{attributes[c.OPERATION_NAME]} {attributes.get(c.REQUEST_MODEL, '')}".rstrip(),
        SpanKind.LLM,
        attributes,
        span_id=open_span.span_id,
        start_ns=open_span.start_ns,
        status=SpanStatus.ERROR if failed else SpanStatus.OK,
        status_message=content.message,
        events=content.events,
    )
    agent.scope.recorder.add(recorded)
    if root is not None:
        root.close()
