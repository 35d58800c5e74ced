"""One model call in three conventions."""

from __future__ import annotations

import json
from typing import Any

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
    "gen_ai.request.model": "groq/m",
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
    "llm.model_name": "groq/m",
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
    "gen_ai.request.model": "groq/m",
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
DIALECTS = {"genai": GENAI, "openinference": OPENINFERENCE, "openllmetry": OPENLLMETRY}
