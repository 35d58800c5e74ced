"""Test that calls of custom and namespaced tools of the Responses API are recorded as in chat."""

from __future__ import annotations

from typing import Any

from lightspan.schema.openai_responses import as_it_is, completion_of, items_to_messages

PATCH: dict[str, Any] = {
    "type": "custom_tool_call",
    "call_id": "c1",
    "name": "apply_patch",
    "input": "+a",
}
NOTE: dict[str, Any] = {
    "type": "function_call",
    "call_id": "c2",
    "namespace": "team",
    "name": "note",
    "arguments": '{"text":"b"}',
}
CALLS = [
    {
        "id": "c1",
        "type": "function",
        "function": {"name": "apply_patch", "arguments": '{"input":"+a"}'},
    },
    {
        "id": "c2",
        "type": "function",
        "function": {"name": "team.note", "arguments": '{"text":"b"}'},
    },
]


def test_calls_and_their_outputs() -> None:
    outputs = [
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": "ok"},
    ]
    assert items_to_messages([PATCH, NOTE, *outputs], as_it_is) == [
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": "ok"},
    ]


def test_an_item_that_is_left_out() -> None:
    items = [{"type": "reasoning", "summary": []}, {"role": "user", "content": "hi"}]
    assert items_to_messages(items, lambda item, where: {}) == [{"role": "user", "content": "hi"}]


def test_an_answer() -> None:
    usage = {"input_tokens": 3, "output_tokens": 2}
    completion = completion_of({"id": "r", "model": "m", "output": [PATCH, NOTE], "usage": usage})
    [choice] = completion["choices"]
    assert choice["message"]["tool_calls"] == CALLS
    assert choice["finish_reason"] == "tool_calls"
    assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
