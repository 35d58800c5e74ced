"""Test reading three conventions for attributes: OpenTelemetry, OpenInference, OpenLLMetry."""

from __future__ import annotations

from typing import Any

import pytest

from lightspan.schema.semconv import agent_name_of, model_of, usage_of


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
