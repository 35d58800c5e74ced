"""What is kept of what was said: a model or a tool may echo a key."""

from __future__ import annotations

from typing import Final

from lightspan.schema import semconv as c
from lightspan.schema.redaction import values_without_keys
from lightspan.schema.spans import Attributes, Span

CONTENT: Final = frozenset(
    {
        c.INPUT_MESSAGES,
        c.OUTPUT_MESSAGES,
        c.TOOL_CALL_ARGUMENTS,
        c.TOOL_CALL_RESULT,
        c.OBJECT_JSON,
        c.OPERATION_INPUT,
        c.OPERATION_OUTPUT,
        c.PROMPT_ORIGINAL,
    }
)
"""Attributes that hold what was said. Others say who and what: a name is no key, whatever it is."""


def without_keys(span: Span) -> Span:
    """A copy in whose content no key stands (`texts.values_without_keys`). It says so
    (`KEYS_REPLACED`), if one stood there."""
    attributes = span.attributes
    said: Attributes = {key: attributes[key] for key in CONTENT.intersection(attributes)}
    if not said:
        return span
    kept = values_without_keys(said)
    if kept == said:
        return span
    return span.replace(attributes={**attributes, **kept, c.KEYS_REPLACED: True})
