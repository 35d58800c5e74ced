"""Kinds of spans in three conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanKind
from lightspan_otel import attribute_names as a

_KINDS: Final = frozenset(str(kind) for kind in SpanKind)
_KIND_OF_OPERATION: Final = {
    "chat": SpanKind.LLM,
    "text_completion": SpanKind.LLM,
    "generate_content": SpanKind.LLM,
    "execute_tool": SpanKind.TOOL,
    "invoke_agent": SpanKind.AGENT,
    "create_agent": SpanKind.OTHER,
    "invoke_workflow": SpanKind.CHAIN,
}
_KIND_OF_OPENINFERENCE: Final = {
    "LLM": SpanKind.LLM,
    "TOOL": SpanKind.TOOL,
    "AGENT": SpanKind.AGENT,
    "CHAIN": SpanKind.CHAIN,
}
_KIND_OF_OPENLLMETRY: Final = {
    "workflow": SpanKind.CHAIN,
    "task": SpanKind.CHAIN,
    "agent": SpanKind.AGENT,
    "tool": SpanKind.TOOL,
}


def kind_of(attributes: Mapping[str, Any]) -> SpanKind:
    """Return the kind of a span from its attributes in any of the three conventions.

    `OTHER` if the attributes give no kind.
    """
    own = str(attributes.get(a.SPAN_KIND))
    if own in _KINDS:
        return SpanKind(own)
    by_dialect = (
        _KIND_OF_OPERATION.get(str(attributes.get(c.OPERATION_NAME))),
        _KIND_OF_OPENINFERENCE.get(str(attributes.get(c.OPENINFERENCE_KIND)).upper()),
        _KIND_OF_OPENLLMETRY.get(str(attributes.get("traceloop.span.kind"))),
        SpanKind.LLM if "llm.request.type" in attributes else None,
    )
    return next((kind for kind in by_dialect if kind is not None), SpanKind.OTHER)
