"""Tests of translating calls, tools and errors of three conventions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.spans import Span, SpanEvent, SpanKind
from lightspan_otel.normalize import normalized

ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Ulm"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
ANSWERED = [{"role": "assistant", "content": "It rains."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object"},
        },
    }
]

GENAI: dict[str, Any] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.usage.input_tokens": 7,
    "gen_ai.usage.output_tokens": 3,
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
    "gen_ai.input.messages": json.dumps(
        [
            {"role": "user", "parts": [{"type": "text", "content": "Weather?"}]},
            {
                "role": "assistant",
                "parts": [
                    {
                        "type": "tool_call",
                        "id": "call_1",
                        "name": "weather",
                        "arguments": {"city": "Ulm"},
                    }
                ],
            },
            {
                "role": "user",  # as some frameworks have it
                "parts": [{"type": "tool_call_response", "id": "call_1", "result": "rain"}],
            },
        ]
    ),
    "gen_ai.output.messages": json.dumps(
        [{"role": "assistant", "parts": [{"type": "text", "content": "It rains."}]}]
    ),
    "gen_ai.tool.definitions": json.dumps([{"type": "function", **TOOLS[0]["function"]}]),  # type: ignore[dict-item]
}
OPENINFERENCE: dict[str, Any] = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.token_count.prompt": 7,
    "llm.token_count.completion": 3,
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Be brief.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "Weather?",
    "llm.input_messages.2.message.role": "assistant",
    "llm.input_messages.2.message.tool_calls.0.tool_call.id": "call_1",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "weather",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"city":"Ulm"}',
    "llm.input_messages.3.message.role": "tool",
    "llm.input_messages.3.message.tool_call_id": "call_1",
    "llm.input_messages.3.message.content": "rain",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "It rains.",
    "llm.tools.0.tool.json_schema": json.dumps(TOOLS[0]),
}
OPENLLMETRY: dict[str, Any] = {
    "llm.request.type": "chat",
    "gen_ai.request.model": "m",
    "gen_ai.usage.prompt_tokens": 7,
    "gen_ai.usage.completion_tokens": 3,
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Be brief.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": "Weather?",
    "gen_ai.prompt.2.role": "assistant",
    "gen_ai.prompt.2.tool_calls.0.id": "call_1",
    "gen_ai.prompt.2.tool_calls.0.name": "weather",
    "gen_ai.prompt.2.tool_calls.0.arguments": '{"city":"Ulm"}',
    "gen_ai.prompt.3.role": "tool",
    "gen_ai.prompt.3.tool_call_id": "call_1",
    "gen_ai.prompt.3.content": "rain",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "It rains.",
    "llm.request.functions.0.name": "weather",
    "llm.request.functions.0.description": "of a city",
    "llm.request.functions.0.parameters": '{"type": "object"}',
}


def span(attributes: dict[str, Any], **more: Any) -> Span:
    kind = c.kind_of(attributes)
    return Span(
        span_id="1" * 16, trace_id="2" * 32, name="x", kind=kind, attributes=attributes, **more
    )


@pytest.mark.parametrize("said", [GENAI, OPENINFERENCE, OPENLLMETRY])
def test_a_call(said: dict[str, Any]) -> None:
    result = normalized(span(said))
    assert result.kind is SpanKind.LLM
    attributes = result.attributes
    assert genai_messages.input_messages_of(attributes) == ASKED
    assert genai_messages.output_messages_of(attributes) == ANSWERED
    assert json.loads(str(attributes[c.TOOL_DEFINITIONS])) == TOOLS
    assert attributes[c.REQUEST_MODEL] == "m"
    assert (attributes[c.INPUT_TOKENS], attributes[c.OUTPUT_TOKENS]) == (7, 3)
    spread = ("llm.input_messages.", "llm.output_messages.", "gen_ai.prompt.")
    assert not [key for key in attributes if key.startswith(spread)]


@pytest.mark.parametrize("text", ["no JSON", "3", "[1, null]", '{"parts": 3}', "[[]]", "null"])
def test_messages_that_are_none_are_text(text: str) -> None:
    result = normalized(span({"gen_ai.operation.name": "chat", c.INPUT_MESSAGES: text}))
    for message in genai_messages.input_messages_of(result.attributes):
        assert isinstance(message["content"], str)


@pytest.mark.parametrize(
    "said",
    [
        {c.FINISH_REASONS: ["tool_call"]},
        {c.OUTPUT_MESSAGES: '[{"role":"assistant","parts":[],"finish_reason":"tool_call"}]'},
        {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.finish_reason": "tool_use"},
    ],
)
def test_why_an_answer_ended(said: dict[str, Any]) -> None:
    result = normalized(span({"gen_ai.operation.name": "chat", **said}))
    assert result.attributes[c.FINISH_REASONS] == ["tool_calls"]


def test_roles_of_smolagents() -> None:
    """As its clients send them."""
    roles = ("system", "user", "tool-call", "tool-response")
    messages = {f"llm.input_messages.{n}.message.role": role for n, role in enumerate(roles)}
    result = normalized(span({"openinference.span.kind": "LLM", **messages})).attributes
    sent = [message["role"] for message in genai_messages.input_messages_of(result)]
    assert sent == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        (
            '{"args": [], "sanitize_inputs_outputs": true, "kwargs": {"what": "seven"}}',
            '{"what":"seven"}',
        ),
        ('{"args": [], "kwargs": {"what": "seven"}}', '{"args": [], "kwargs": {"what": "seven"}}'),
        ('{"args": [', '{"args": ['),
        ('{"what": "seven"}', '{"what": "seven"}'),
    ],
)
def test_a_tool_of_smolagents_says_how_it_was_called(messages: str, given: str) -> None:
    result = normalized(span({"openinference.span.kind": "TOOL", "input.value": messages}))
    assert result.attributes[c.TOOL_CALL_ARGUMENTS] == given


def test_a_call_that_says_nothing() -> None:
    result = normalized(span({"gen_ai.operation.name": "chat"}))
    assert result.attributes == {"gen_ai.operation.name": "chat"}


@pytest.mark.parametrize(
    "said",
    [
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "look",
            "gen_ai.tool.call.arguments": "in",
            "gen_ai.tool.call.result": "out",
        },
        {
            "openinference.span.kind": "TOOL",
            "tool.name": "look",
            "input.value": "in",
            "output.value": "out",
        },
        {
            "traceloop.span.kind": "tool",
            "traceloop.entity.name": "look",
            "traceloop.entity.input": "in",
            "traceloop.entity.output": "out",
        },
    ],
)
def test_a_tool(said: dict[str, Any]) -> None:
    attributes = normalized(span(said)).attributes
    keys = (c.TOOL_NAME, c.TOOL_CALL_ARGUMENTS, c.TOOL_CALL_RESULT)
    assert [attributes[key] for key in keys] == ["look", "in", "out"]


def test_an_error_that_an_event_tells_of() -> None:
    event = SpanEvent("exception", 1, {c.EXCEPTION_TYPE: "ValueError"})
    assert normalized(span({}, events=[event])).attributes == {c.ERROR_TYPE: "ValueError"}


def test_what_a_sender_may_not_say() -> None:
    """Attributes known to gateway and runners only, or invalid for readers."""
    said = {
        "gen_ai.operation.name": "chat",
        c.CALL_ID: "call-of-another",
        c.CALL_OUTCOME: "none of ours",
        c.SAMPLING_OVERRIDES: "no JSON",
        c.TOOL_DEFINITIONS: "no JSON",
        c.AGENT_PATH: "boss/writer",
    }
    result = normalized(span(said, sequence_start=1, sequence_end=2))
    assert result.attributes == {"gen_ai.operation.name": "chat", c.AGENT_PATH: "boss/writer"}
    assert (result.sequence_start, result.sequence_end) == (None, None)
