"""Conversion of our spans to spans of OpenTelemetry's SDK."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind as OtelKind,
    Status,
    StatusCode,
    TraceFlags,
)

from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.images import Image
from lightspan.schema.media import digests_in
from lightspan.schema.spans import Span, SpanKind, SpanStatus, clean_attributes
from lightspan_otel import attribute_names as a

_SCOPE: Final = InstrumentationScope("lightspan")
_ANNOTATIONS: Final = {
    "user": ("user.id",),
    "session": ("session.id",),
    "tags": ("tag.tags", "langfuse.trace.tags"),
}
"""Name in `emit_annotation` → attributes from which Langfuse and Phoenix read it."""
_MESSAGES: Final = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES)
STATUS_CODES: Final = {
    SpanStatus.UNSET: StatusCode.UNSET,
    SpanStatus.OK: StatusCode.OK,
    SpanStatus.ERROR: StatusCode.ERROR,
}


def to_otel(span: Span) -> ReadableSpan:
    """Convert a span to a span of OpenTelemetry's SDK, which any exporter accepts."""
    trace_id = int(span.trace_id, 16)
    message = span.status_message if span.status is SpanStatus.ERROR else ""
    return ReadableSpan(
        name=span.name,
        context=_context(trace_id, span.span_id),
        parent=_context(trace_id, span.parent_id) if span.parent_id else None,
        resource=Resource(dict(span.resource)),
        attributes=_sequences({**span.attributes, **_own_attributes(span)}),
        events=[Event(e.name, _sequences(e.attributes), e.time_ns) for e in span.events],
        links=[
            Link(_context(int(link.trace_id, 16), link.span_id), _sequences(link.attributes))
            for link in span.links
        ],
        kind=OtelKind.CLIENT if span.kind is SpanKind.LLM else OtelKind.INTERNAL,
        status=Status(STATUS_CODES[span.status], message or None),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def with_image_bytes(span: Span, images: Mapping[str, Image]) -> Span:
    """Return a span whose messages have the bytes of images in place of references to them.

    A part `blob` gets the `content` that OpenTelemetry's convention names, in base64.

    Args:
        span: the span.
        images: digest → image.
    """

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(item) for item in value]
        if not isinstance(value, dict):
            return value
        image = images.get(str(value.get("sha256"))) if value.get("type") == "blob" else None
        if image is None:
            return {key: filled(item) for key, item in value.items()}
        return {**value, "content": base64.b64encode(image.data).decode()}

    def whole(text: str) -> str:
        try:
            return genai_messages.dump_json(filled(json.loads(text)))
        except ValueError:  # a hook of the user may have cut it
            return text

    messages = {
        key: whole(str(value))
        for key, value in span.attributes.items()
        if key in _MESSAGES and digests_in({key: value}) & images.keys()
    }
    return span.replace(attributes={**span.attributes, **messages}) if messages else span


def _own_attributes(span: Span) -> dict[str, Any]:
    fields: dict[str, Any] = {
        c.ROLLOUT_ID: span.rollout_id or None,
        c.ATTEMPT_ID: span.attempt_id or None,
        a.SPAN_KIND: span.kind.value,
        a.SEQUENCE_START: span.sequence_start,
        a.SEQUENCE_END: span.sequence_end,
        a.SPAN_LATE: span.late or None,
        a.SPAN_SCHEMA: span.schema,
    }
    for name, keys in _ANNOTATIONS.items():
        if (value := span.attributes.get(c.ANNOTATION + name)) is not None:
            fields |= dict.fromkeys(keys, value)
    return _sequences(clean_attributes(fields))


def _sequences(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in attributes.items()}


def _context(trace_id: int, span_id: str) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=flags)
