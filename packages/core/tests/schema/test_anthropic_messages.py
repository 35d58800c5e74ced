"""Test that Anthropic's requests and answers get the same attributes as equal chat calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightspan.schema import semconv as c
from lightspan.schema.genai_attributes import StreamedAnswer, answer_attributes, request_attributes

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
SHOWN = {"type": "uri", "modality": "image", "uri": "https://example.com/a.png"}
ASKED: dict[str, Any] = {
    "model": "claude",
    "max_tokens": 9,
    "stream": True,
    "temperature": 0.5,
    "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    "stop_sequences": ["x"],
    "messages": [
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"},
                {"type": "text", "text": "And this?"},
                IMAGE,
            ],
        },
    ],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-1",
    "content": [
        {"type": "text", "text": "Yes."},
        {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {"x": 2}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 3},
}
RECORDED = {
    c.RESPONSE_ID: "msg_1",
    c.RESPONSE_MODEL: "claude-1",
    c.INPUT_TOKENS: 12,
    c.OUTPUT_TOKENS: 3,
    c.FINISH_REASONS: ["tool_calls"],
    c.OUTPUT_MESSAGES: json.dumps(
        [
            {
                "role": "assistant",
                "parts": [
                    {"type": "text", "content": "Yes."},
                    {"type": "tool_call", "id": "toolu_2", "name": "add", "arguments": '{"x":2}'},
                ],
                "finish_reason": "tool_calls",
            }
        ],
        separators=(",", ":"),
    ),
}


def test_a_request() -> None:
    attributes = request_attributes(ASKED)
    prompt, tools = attributes.pop(c.INPUT_MESSAGES), attributes.pop(c.TOOL_DEFINITIONS)
    assert attributes == {
        c.OPERATION_NAME: "chat",
        c.REQUEST_MODEL: "claude",
        c.REQUEST_STREAM: True,
        c.REQUEST_TEMPERATURE: 0.5,
        c.REQUEST_MAX_TOKENS: 9,
        c.OPENINFERENCE_KIND: "LLM",
    }
    called = {"type": "tool_call", "id": "toolu_1", "name": "add", "arguments": '{"x":1}'}
    assert json.loads(str(prompt)) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Add."}]},
        {"role": "assistant", "parts": [{"type": "text", "content": "Yes."}, called]},
        {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "response": "2", "id": "toolu_1"}],
        },
        {"role": "user", "parts": [{"type": "text", "content": "And this?"}, SHOWN]},
    ]
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    assert json.loads(str(tools)) == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    "messages",
    [5, [5, None], [{"content": "x"}], [{"role": "user", "content": [5, {"type": "tool_use"}]}]],
)
def test_what_is_no_request_is_recorded_as_it_is(messages: Any) -> None:
    for system in (5, [5], ""):
        attributes = request_attributes({"system": system, "messages": messages, "tools": 5})
        assert c.INPUT_MESSAGES in attributes


@pytest.mark.parametrize(
    ("reason", "recorded"),
    [
        ("end_turn", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "refusal"),
    ],
)
def test_why_an_answer_ended(reason: str, recorded: str) -> None:
    answer = {**MESSAGE, "content": [], "stop_reason": reason}
    assert answer_attributes(answer)[c.FINISH_REASONS] == [recorded]


def events() -> list[dict[str, Any]]:
    begun = {**MESSAGE, "content": [], "stop_reason": None}
    usage = {"input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 1}
    call = {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {}}
    return [
        {"type": "message_start", "message": {**begun, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        _delta(0, {"type": "text_delta", "text": "Y"}),
        _delta(0, {"type": "text_delta", "text": "es."}),
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": call},
        _delta(1, {"type": "input_json_delta", "partial_json": '{"x":'}),
        _delta(1, {"type": "input_json_delta", "partial_json": "2}"}),
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 3, "input_tokens": None},
        },
        {"type": "message_stop"},
    ]


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def test_a_streamed_answer() -> None:
    streamed = StreamedAnswer()
    for event in events():
        streamed.add(event)
    assert streamed.complete
    assert streamed.answer() == MESSAGE
    assert answer_attributes(MESSAGE) == RECORDED


def test_a_stream_that_was_cut() -> None:
    """Check that the id, the text, and the beginning of the tool call are recorded."""
    streamed = StreamedAnswer()
    for event in events()[:7]:
        streamed.add(event)
    assert not streamed.complete
    attributes = answer_attributes(streamed.answer())
    assert c.FINISH_REASONS not in attributes
    assert (attributes[c.RESPONSE_ID], attributes[c.OUTPUT_TOKENS]) == ("msg_1", 1)
    [message] = json.loads(str(attributes[c.OUTPUT_MESSAGES]))
    assert message["parts"] == [
        {"type": "text", "content": "Yes."},
        {"type": "tool_call", "id": "toolu_2", "name": "add", "arguments": '{"x":'},
    ]
