"""Test reading three conventions for attributes: OpenTelemetry, OpenInference, OpenLLMetry."""

from __future__ import annotations

from typing import Any

import pytest

from lightspan.schema import semconv
from lightspan.schema.semconv import agent_name_of, kind_of, model_of, usage_of
from lightspan.schema.spans import SpanKind


@pytest.mark.parametrize("kind", SpanKind)
def test_our_own_kind(kind: SpanKind) -> None:
    assert kind_of({semconv.SPAN_KIND: str(kind)}) is kind
    assert kind_of({semconv.SPAN_KIND: kind, "openinference.span.kind": "LLM"}) is kind


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
        ({semconv.SPAN_KIND: "nonsense", "llm.request.type": "chat"}, SpanKind.LLM),
    ],
)
def test_kinds(attributes: dict[str, Any], kind: SpanKind) -> None:
    assert kind_of(attributes) is kind


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"gen_ai.agent.name": "writer"}, "writer"),
        ({"graph.node.id": "write_query"}, "write_query"),
        ({"traceloop.span.kind": "agent", "traceloop.entity.name": "writer"}, "writer"),
        ({"traceloop.span.kind": "task", "traceloop.entity.name": "step"}, None),
        ({"gen_ai.agent.name": "", "agent.name": "writer"}, "writer"),
        ({}, None),
    ],
)
def test_agent_names(attributes: dict[str, Any], name: str | None) -> None:
    assert agent_name_of(attributes) == name


@pytest.mark.parametrize(
    ("attributes", "model"),
    [
        ({"gen_ai.request.model": "asked", "gen_ai.response.model": "got"}, "asked"),
        ({"llm.model_name": "qwen"}, "qwen"),
        ({}, None),
    ],
)
def test_models(attributes: dict[str, Any], model: str | None) -> None:
    assert model_of(attributes) == model


@pytest.mark.parametrize(
    ("attributes", "usage"),
    [
        ({"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 7}, (5, 7)),
        ({"gen_ai.usage.prompt_tokens": 5, "gen_ai.usage.completion_tokens": 7}, (5, 7)),
        ({"llm.token_count.prompt": 5, "llm.token_count.completion": 7}, (5, 7)),
        ({"llm.usage.prompt_tokens": 5, "llm.usage.completion_tokens": 7}, (5, 7)),
        ({"gen_ai.usage.input_tokens": 0}, (0, None)),
        ({"gen_ai.usage.input_tokens": True, "llm.token_count.prompt": 3}, (3, None)),
        ({}, (None, None)),
    ],
)
def test_usage(attributes: dict[str, Any], usage: tuple[int | None, int | None]) -> None:
    assert usage_of(attributes) == usage
