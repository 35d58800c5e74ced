"""Conversion between OpenTelemetry's spans and lightspan's.

`LightspanSpanProcessor`, added to an app's tracer provider, records the spans that any library
creates while an attempt (a recorded run of the app) is open. `export` sends stored spans to any
OpenTelemetry exporter; `encode_otlp` and `decode_otlp` convert to and from OTLP's protobuf without
loss. lightspan never writes to the app's tracer provider, so no prompt text reaches the app's
exporters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from lightspan.capture.context import (
    AgentContext,
    CallListener,
    add_call_listener,
    current_agent,
    current_context,
    remove_call_listener,
)
from lightspan.errors import DataError, LightspanError
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.spans import (
    SCHEMA_VERSION,
    Attributes,
    Span,
    SpanEvent,
    SpanKind,
    SpanLink,
    clean_attributes,
)
from lightspan_otel import attribute_names as a
from lightspan_otel.open_spans import open_span_by_ids, recorded_whole
from lightspan_otel.span_kinds import kind_of
from lightspan_otel.to_otel import STATUS_CODES, to_otel

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span as LiveSpan

_STATUS_IN: Final = {code: status for status, code in STATUS_CODES.items()}
_FIELD_ATTRIBUTES: Final = (
    c.ROLLOUT_ID,
    c.ATTEMPT_ID,
    a.SPAN_KIND,
    a.SEQUENCE_START,
    a.SEQUENCE_END,
    a.SPAN_LATE,
    a.SPAN_SCHEMA,
)
"""Attributes that store the fields of `Span` which OpenTelemetry's spans lack."""


class LightspanSpanProcessor(SpanProcessor):
    """Record the spans that an app's own instrumentation creates while an attempt is open.

    An attempt is a recorded run of the app; outside of attempts nothing is recorded. Add the
    processor to the app's provider: `provider.add_span_processor(LightspanSpanProcessor())`. A span
    without a parent becomes a child of lightspan's innermost open span. The span of a model call
    that lightspan records too becomes a span of kind `chain`, so that the call counts once.
    """

    def __init__(self) -> None:
        from lightspan_otel import llm_spans

        self._open: dict[tuple[int, int], AgentContext] = {}
        self._repeats_call = llm_spans.repeats_call
        # an object of its own, which `shutdown` removes alone
        self._listener: CallListener = partial(llm_spans.note_call)
        add_call_listener(self._listener)

    def on_start(self, span: LiveSpan, parent_context: Context | None = None) -> None:
        if current_context() is None:
            return
        current = current_agent()
        context = span.get_span_context()
        if current is not None and context is not None and current.scope.recorder.keeps:
            key = (context.trace_id, context.span_id)
            self._open[key] = current
            recorded_whole.add(key)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None:
            return
        key = (context.trace_id, context.span_id)
        current = self._open.pop(key, None)
        if current is None:
            return
        scope, open_span = current.scope, open_span_by_ids(*key)
        recorded_whole.discard(key)
        try:
            recorded = from_otel(span)
            is_call = recorded.kind is SpanKind.LLM
            if is_call and self._repeats_call(recorded.start_ns, recorded.end_ns):
                recorded = recorded.replace(kind=SpanKind.CHAIN)
            # the identity of an agent's span is recorded once: here, with all attributes
            identity = {} if open_span is None else open_span.mark_recorded_elsewhere()
            attributes = {c.AGENT_PATH: current.path, **recorded.attributes, **identity}
            scope.recorder.add(
                recorded.replace(
                    rollout_id=scope.rollout_id,
                    attempt_id=scope.attempt_id,
                    parent_id=recorded.parent_id or current.parent_span_id,
                    attributes=attributes,
                )
            )
        except Exception as error:  # never raise into the app
            scope.recorder.add_capture_error(f"a span could not be recorded: {error!r}")

    def shutdown(self) -> None:
        remove_call_listener(self._listener)
        recorded_whole.difference_update(self._open)
        self._open.clear()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


# --- one span -------------------------------------------------------------------------------
def from_otel(span: ReadableSpan) -> Span:
    """Convert an OpenTelemetry span to ours.

    Raises:
        DataError: the span has no context.
    """
    context = span.get_span_context()
    if context is None:
        raise DataError(f"the OpenTelemetry span {span.name!r} has no context")
    attributes = clean_attributes(dict(span.attributes or {}))
    return span_of(
        attributes,
        span_id=f"{context.span_id:016x}",
        trace_id=f"{context.trace_id:032x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent is not None else None,
        name=span.name,
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        status=_STATUS_IN[span.status.status_code],
        status_message=span.status.description or "",
        events=[
            SpanEvent(event.name, event.timestamp, clean_attributes(dict(event.attributes or {})))
            for event in span.events
        ],
        links=[
            SpanLink(
                f"{link.context.trace_id:032x}",
                f"{link.context.span_id:016x}",
                clean_attributes(dict(link.attributes or {})),
            )
            for link in span.links
        ],
        resource=clean_attributes(dict(span.resource.attributes)) if span.resource else {},
    )


def span_of(attributes: Attributes, **fields: Any) -> Span:
    """Build a `Span` from OpenTelemetry attributes and other fields.

    Some fields of `Span` have no counterpart in OpenTelemetry. Senders store them in the attributes
    `_FIELD_ATTRIBUTES`, from which they are read here.

    Args:
        attributes: attributes from `clean_attributes`; those that become fields are removed.
        fields: the other fields of `Span`.
    """
    kind = kind_of(attributes)
    own = {key: attributes.pop(key) for key in _FIELD_ATTRIBUTES if key in attributes}
    return Span(
        kind=kind,
        rollout_id=str(own.get(c.ROLLOUT_ID, "")),
        attempt_id=str(own.get(c.ATTEMPT_ID, "")),
        sequence_start=_optional_int(own.get(a.SEQUENCE_START)),
        sequence_end=_optional_int(own.get(a.SEQUENCE_END)),
        late=bool(own.get(a.SPAN_LATE, False)),
        schema=int(str(own.get(a.SPAN_SCHEMA, SCHEMA_VERSION))),
        attributes=attributes,
        **fields,
    )


def _optional_int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


# --- many spans -----------------------------------------------------------------------------
def export(spans: Iterable[Span], exporter: SpanExporter, *, batch_size: int = 512) -> int:
    """Send spans to an OpenTelemetry exporter, at most `batch_size` per call; return their number.

    Raises:
        LightspanError: the exporter fails; the message gives the number of spans sent before.
    """
    waiting = [to_otel(span) for span in spans]
    for begin in range(0, len(waiting), batch_size):
        result = exporter.export(waiting[begin : begin + batch_size])
        if result is not SpanExportResult.SUCCESS:
            raise LightspanError(f"the exporter failed after {begin} spans; is its endpoint up?")
    return len(waiting)


def encode_otlp(spans: Sequence[Span]) -> bytes:
    """Encode spans as OTLP protobuf (`ExportTraceServiceRequest`)."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    data: bytes = encode_spans([to_otel(span) for span in spans]).SerializeToString()
    return data


def decode_otlp(data: bytes) -> list[Span]:
    """Decode the spans of OTLP protobuf (`ExportTraceServiceRequest`).

    Raises:
        DataError: `data` is no OTLP, or a span in it is invalid.
    """
    from lightspan_otel.otlp import decode_protobuf

    decoded = decode_protobuf(data)
    if decoded.refused:
        raise DataError(f"not OTLP traces: {decoded.refused[0]}")
    return [arrival.span for arrival in decoded.arrivals]


def decode_span(span: Any, resource: Attributes) -> Span:
    """Convert a span of OTLP's protobuf.

    Args:
        span: the protobuf message.
        resource: attributes of the process that sent the span.
    """
    status = _STATUS_IN[StatusCode(span.status.code)]
    return span_of(
        decode_attributes(span.attributes),
        span_id=span.span_id.hex(),
        trace_id=span.trace_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=status,
        status_message=span.status.message,
        events=[
            SpanEvent(event.name, event.time_unix_nano, decode_attributes(event.attributes))
            for event in span.events
        ],
        links=[
            SpanLink(link.trace_id.hex(), link.span_id.hex(), decode_attributes(link.attributes))
            for link in span.links
        ],
        resource=dict(resource),
    )


def decode_attributes(pairs: Any) -> Attributes:
    """Convert attributes of OTLP's protobuf. Nested values become JSON."""
    return clean_attributes({pair.key: plain_value(_decode_value(pair.value)) for pair in pairs})


def plain_value(value: Any) -> Any:
    """Return an attribute's value, as JSON if it is nested."""
    items = value if isinstance(value, list) else [value]
    nested = any(isinstance(item, dict | list) for item in items)
    return dump_json(value) if nested else value


def _decode_value(value: Any) -> Any:
    """Convert an `AnyValue` of OTLP's protobuf."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_decode_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _decode_value(pair.value) for pair in value.kvlist_value.values}
    return getattr(value, kind)
