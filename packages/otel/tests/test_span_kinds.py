"""Test the kinds of spans of OpenTelemetry, OpenInference and OpenLLMetry."""

from __future__ import annotations

from typing import Any

import pytest

from lightspan.schema.spans import SpanKind
from lightspan_otel import attribute_names as a
from lightspan_otel.span_kinds import kind_of


@pytest.mark.parametrize("kind", SpanKind)
def test_our_own_kind(kind: SpanKind) -> None:
    assert kind_of({a.SPAN_KIND: str(kind)}) is kind
    assert kind_of({a.SPAN_KIND: kind, "openinference.span.kind": "LLM"}) is kind


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        ({"gen_ai.operation.name": "chat"}, SpanKind.LLM),
        (
            {"gen_ai.operation.name": "execute_tool", "openinference.span.kind": "CHAIN"},
            SpanKind.TOOL,
        ),
        ({"gen_ai.operation.name": "invoke_agent"}, SpanKind.AGENT),
        ({"gen_ai.operation.name": "invoke_workflow"}, SpanKind.CHAIN),
        ({"openinference.span.kind": "llm"}, SpanKind.LLM),
        ({"openinference.span.kind": "TOOL"}, SpanKind.TOOL),
        ({"openinference.span.kind": "CHAIN"}, SpanKind.CHAIN),
        ({"traceloop.span.kind": "task"}, SpanKind.CHAIN),
        ({"llm.request.type": "chat"}, SpanKind.LLM),
        ({}, SpanKind.OTHER),
        ({"gen_ai.operation.name": 5, "openinference.span.kind": None}, SpanKind.OTHER),
        ({a.SPAN_KIND: "nonsense", "llm.request.type": "chat"}, SpanKind.LLM),
    ],
)
def test_kinds(attributes: dict[str, Any], kind: SpanKind) -> None:
    assert kind_of(attributes) is kind
