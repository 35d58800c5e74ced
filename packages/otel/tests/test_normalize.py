"""Tests of translating calls, tools and errors of three conventions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.spans import Span, SpanEvent, SpanKind, SpanStatus
from lightspan_otel.normalize import normalized
from lightspan_otel.span_kinds import kind_of
from packages.otel.tests.dialects import ANSWERED, ASKED, DIALECTS, TOOLS


def span(attributes: dict[str, Any], **more: Any) -> Span:
    kind = kind_of(attributes)
    return Span(
        span_id="1" * 16, trace_id="2" * 32, name="x", kind=kind, attributes=attributes, **more
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call(dialect: str) -> None:
    result = normalized(span(DIALECTS[dialect]))
    assert result.kind is SpanKind.LLM
    attributes = result.attributes
    assert genai_messages.input_messages_of(attributes) == ASKED
    assert genai_messages.output_messages_of(attributes) == ANSWERED
    assert json.loads(str(attributes[c.TOOL_DEFINITIONS])) == TOOLS
    assert attributes[c.REQUEST_MODEL] == "groq/m"
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
        {"llm.output_messages.0.message.role": "assistant", "llm.finish_reason": "tool_use"},
    ],
)
def test_why_an_answer_ended(said: dict[str, Any]) -> None:
    result = normalized(span({"gen_ai.operation.name": "chat", **said}))
    assert result.attributes[c.FINISH_REASONS] == ["tool_calls"]


def test_roles_of_smolagents() -> None:
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


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (SpanStatus.UNSET, {c.ERROR_TYPE: "TimeoutError"}, SpanStatus.ERROR),
        (SpanStatus.OK, {c.ERROR_TYPE: "TimeoutError"}, SpanStatus.OK),
        (SpanStatus.UNSET, {}, SpanStatus.UNSET),
    ],
)
def test_a_call_with_the_type_of_an_error_has_failed(
    status: SpanStatus, error: dict[str, str], expected: SpanStatus
) -> None:
    """The convention sets the type only if the operation ended in an error."""
    result = normalized(span({"gen_ai.operation.name": "chat", **error}, status=status))
    assert result.status is expected


def test_keys_in_errors_and_messages_are_replaced() -> None:
    key = "sk-" + "abcdefghijklmnopqrstuvwx1234567890"
    error = {c.EXCEPTION_TYPE: "E", c.EXCEPTION_MESSAGE: f"bad key {key}"}
    message = genai_messages.dump([{"role": "user", "content": f"my key is {key}"}])
    result = normalized(
        span(
            {c.OPERATION_NAME: "chat", c.INPUT_MESSAGES: message},
            status_message=f"refused: {key}",
            events=[SpanEvent("exception", 1, error), SpanEvent("gen_ai.choice", 1, {"text": key})],
        )
    )
    assert key not in repr(result)
    assert result.status_message == "refused: <key>"
    assert result.attributes[c.KEYS_REPLACED] is True


def test_what_a_sender_may_not_say() -> None:
    """Attributes that only gateway and runners set, or that readers cannot decode, are dropped."""
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
