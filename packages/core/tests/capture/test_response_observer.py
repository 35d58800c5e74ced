"""Test that reading an answer of an SDK leaves it unchanged for the app."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from lightspan.capture.response_observer import as_mapping
from lightspan.schema.genai_attributes import ANSWER_FIELDS, answer_attributes
from packages.core.tests.schema.test_anthropic_messages import MESSAGE

FUNCTION = {"name": "look", "arguments": "{}"}
MORE: list[dict[str, Any]] = [
    {},
    {"tool_calls": [{"id": "call_1", "type": "function", "function": FUNCTION}]},
    {"refusal": "no"},
    {"reasoning": "an endpoint's own"},
]
COMPLETION: dict[str, Any] = {
    "id": "chatcmpl-1",
    "model": "m",
    "service_tier": "default",
    "choices": [
        {
            "index": number,
            "message": {"role": "assistant", "content": "yes", **more},
            "finish_reason": "stop",
            "logprobs": {"content": []},
            "token_ids": [4, number],
        }
        for number, more in enumerate(MORE)
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    "prompt_token_ids": [1, 2, 3],
}
TEXT = {**COMPLETION, "choices": [{"index": 0, "text": "yes", "finish_reason": "length"}]}
RESPONSE = {
    "id": "resp_1",
    "model": "m",
    "status": "incomplete",
    "incomplete_details": {"reason": "max_output_tokens"},
    "instructions": "Answer.",
    "output": [
        {"type": "message", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "function_call", "call_id": "c", **FUNCTION},
    ],
    "usage": {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4},
}


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("openai.types.chat", "ChatCompletion", COMPLETION),
        ("openai.types", "Completion", TEXT),
        ("openai.types.responses", "Response", RESPONSE),
        ("anthropic.types", "Message", MESSAGE),
    ],
)
def test_all_that_is_recorded_of_an_answer_is_read(
    module: str, name: str, said: dict[str, Any]
) -> None:
    pytest.importorskip(module.partition(".")[0])
    answer = getattr(importlib.import_module(module), name).construct(**said)
    read = as_mapping(answer, ANSWER_FIELDS)
    assert answer_attributes(read) == answer_attributes(as_mapping(answer)) != {}
    assert not {"service_tier", "instructions"} & read.keys()
    assert all("logprobs" not in choice for choice in read.get("choices", ()))
