"""Remove API keys from the recorded content of spans: a model or a tool may repeat a key."""

from __future__ import annotations

from typing import Final

from lightspan.schema import semconv as c
from lightspan.schema.redaction import values_without_keys
from lightspan.schema.spans import Attributes, Span

CONTENT: Final = frozenset(
    (
        *(c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.TOOL_CALL_ARGUMENTS, c.TOOL_CALL_RESULT),
        *(c.OBJECT_JSON, c.OPERATION_INPUT, c.OPERATION_OUTPUT, c.PROMPT_ORIGINAL),
    )
)
"""Attributes with recorded texts. Other attributes are names and numbers, without API keys."""


def without_keys(span: Span) -> Span:
    """Return the span with API keys in its content replaced (`redaction.values_without_keys`).

    The attribute `KEYS_REPLACED` is set if there were any.
    """
    attributes = span.attributes
    content: Attributes = {key: attributes[key] for key in CONTENT.intersection(attributes)}
    redacted = values_without_keys(content) if content else content
    if redacted == content:
        return span
    return span.replace(attributes={**attributes, **redacted, c.KEYS_REPLACED: True})
