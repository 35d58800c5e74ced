"""Record model calls known only from spans, if the user opts in (`content=True`).

lightspan's patches of SDKs and its adapters record the model calls that pass through them. Other
frameworks only emit a span per model call, with attributes that `normalize` translates. In
production such a span is recorded as a model call of its attempt, unless the call is recorded
already. In rollouts nothing is recorded from spans.

The call of a span counts as recorded already in two cases: if a call was recorded inside the span,
or if a recorded call was open in the same context when the span began. If two libraries make nested
spans of one call, only the inner span is recorded, or the outer one if the inner has no messages.
But nested spans with a tool or an agent between them are two calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan

from lightspan.capture import context
from lightspan.capture._globals import state
from lightspan.capture.adapter import add_capture_error
from lightspan.capture.context import AgentContext, CallEnd, make_span
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.schema.media import images_into
from lightspan.schema.records import Mode
from lightspan.schema.spans import Attributes, Span, SpanEvent, SpanKind, SpanStatus, now_ns
from lightspan.schema.token_records import CallOutcome
from lightspan_otel.agent_names import Role
from lightspan_otel.convert import from_otel
from lightspan_otel.normalize import INPUTS, MESSAGES, bounded, loaded, normalized
from lightspan_otel.open_spans import (
    NAME,
    MessageContent,
    OpenSpan,
    inside_of,
    open_here,
    recorded_whole,
)
from lightspan_otel.span_kinds import kind_of

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
    """A model call that is recorded without spans, and whether it is still open."""

    def __init__(self) -> None:
        self.start_ns = now_ns()
        self.end_ns = sys.maxsize
        """End in nanoseconds since the epoch; the largest number while the call is open."""

    def end(self, is_answered: bool) -> None:
        self.end_ns = now_ns()


_recorded: Final[ContextVar[tuple[_CallState, ...]]] = ContextVar(
    "lightspan_otel_recorded", default=()
)
"""Calls begun in this context that an SDK patch or an adapter records."""


def note_call(acting: AgentContext) -> CallEnd | None:
    """Mark the spans around a beginning model call: the call is recorded, and not from spans.

    This is a `CallListener`: it runs when such a call begins, and returns a function to call at its
    end.
    """
    _mark(open_here())
    call = _CallState()
    _recorded.set((call, *_recorded.get())[:_MAX_OPEN])
    return call.end


def repeats_call(start_ns: int, end_ns: int) -> bool:
    """Return whether a span of a model call, with these times, repeats a recorded call.

    The recorded call began in the current context, and was open at the time of the span.
    """
    return any(call.start_ns < end_ns and start_ns < call.end_ns for call in _recorded.get())


def _mark(spans: Iterable[OpenSpan]) -> None:
    """Set `has_call` of the spans that belong to one model call, which is recorded already.

    These are the spans up to and including the first agent or tool. Spans around that agent or tool
    belong to another call.

    Args:
        spans: nested spans, innermost first.
    """
    for open_span in spans:
        open_span.has_call = True
        if open_span.role in (Role.AGENT, Role.TOOL):
            break


def input_of(span: ReadableSpan) -> Any:
    """Return the decoded input in a span's attributes; None if the span has no input yet."""
    attributes = span.attributes or {}
    return loaded(next((attributes[key] for key in INPUTS if key in attributes), None))


def begin(open_span: OpenSpan, start_ns: int) -> None:
    """Set `open_span.has_call` when the span begins: whether a recorded model call is open.

    Some libraries make the span of a call after its answer, with an earlier start. So the call
    counts that was open at the span's start.
    """
    if open_span.agent is None or open_span.agent.scope.mode is not Mode.PRODUCTION:
        return
    open_span.has_call = any(start_ns < call.end_ns for call in _recorded.get())


def read(open_span: OpenSpan, span: ReadableSpan) -> None:
    """Read the content of an ended span. Never raises.

    A model call that is not recorded otherwise is recorded. The content of a tool or an agent is
    kept in `open_span`.
    """
    agent = open_span.agent
    if agent is None or agent.scope.mode is not Mode.PRODUCTION or open_span.ids in recorded_whole:
        return
    try:
        kind = kind_of(span.attributes or {})
        if kind is SpanKind.LLM:
            if not open_span.has_call:
                found: dict[str, Image] = {}
                with images_into(found):
                    call = normalized(from_otel(span))
                if open_span.is_in_call and not call.attributes.keys() & MESSAGES:
                    return  # the span around it may have messages
                _record(open_span, agent, call, found)
        elif kind in _CONTENT_ATTRIBUTES:
            open_span.content = _content(normalized(from_otel(span)), _CONTENT_ATTRIBUTES[kind])
    except Exception as error:
        add_capture_error(agent.scope.recorder, NAME, error)


def _content(span: Span, keys: frozenset[str]) -> MessageContent:
    attributes: Attributes = {key: span.attributes[key] for key in keys & span.attributes.keys()}
    events = [
        SpanEvent(event.name, event.time_ns, bounded(event.attributes))
        for event in span.events
        if c.EXCEPTION_TYPE in event.attributes
    ]
    return MessageContent(attributes, span.status_message, events)


def _record(open_span: OpenSpan, agent: AgentContext, span: Span, images: dict[str, Image]) -> None:
    """Record a model call from its span; open an attempt for it if there is none.

    Args:
        open_span: state of the span.
        agent: context in which the span began.
        span: the span, with translated attributes.
        images: images in the span's messages.
    """
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
    if agent.scope.recorder.images is not None:
        agent.scope.recorder.images |= images
    agent.scope.recorder.add(recorded)
    if root is not None:
        root.close()
