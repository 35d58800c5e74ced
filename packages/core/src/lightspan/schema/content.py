"""Remove API keys from the recorded content of spans: a model or a tool may repeat a key."""

from __future__ import annotations

from lightspan.schema import semconv as c
from lightspan.schema.redaction import values_without_keys
from lightspan.schema.spans import Span, SpanEvent


def without_keys(span: Span) -> Span:
    """Return the span with API keys in attributes and events replaced (`values_without_keys`).

    The attribute `KEYS_REPLACED` is set if there were any.
    """
    attributes = values_without_keys(span.attributes)
    events = [SpanEvent(e.name, e.time_ns, values_without_keys(e.attributes)) for e in span.events]
    if (attributes, events) == (span.attributes, span.events):
        return span
    return span.replace(attributes={**attributes, c.KEYS_REPLACED: True}, events=events)
