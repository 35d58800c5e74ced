"""Normalize the attributes of other libraries' spans: pure.

The GenAI conventions, OpenInference and OpenLLMetry have the messages of a call, its tools, a
tool's arguments and an error each in their own attributes; readers of stored spans know one form of
them (`lightspan.schema.genai_attributes`). What is in that form is not kept twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.spans import Attributes, Span, SpanKind, clean_attributes
from lightspan_otel.agent_names import tool_call_id, tool_name

INSTRUCTIONS: Final = "gen_ai.system_instructions"
_OPENINFERENCE: Final = {
    c.INPUT_MESSAGES: "llm.input_messages",
    c.OUTPUT_MESSAGES: "llm.output_messages",
}
_OPENLLMETRY: Final = {c.INPUT_MESSAGES: "gen_ai.prompt", c.OUTPUT_MESSAGES: "gen_ai.completion"}
INPUTS: Final = ("input.value", "traceloop.entity.input")
"""What a run was given."""
_OUTPUTS: Final = ("output.value", "traceloop.entity.output")
_ARGUMENTS: Final = ("tool_call.function.arguments", *INPUTS, "tool.parameters")
"""What a tool was given; the last may also be what it takes."""
_TOLD_TWICE: Final = (
    *("llm.input_messages.", "llm.output_messages.", "llm.tools.", "llm.request.functions."),
    *("gen_ai.prompt.", "gen_ai.completion."),
)

_OURS: Final = (
    *(c.AGENT_PATH, c.OPERATION_INPUT, c.OPERATION_OUTPUT, c.FEEDBACK, c.ANNOTATION),
    *("lightspan.reward.", c.MESSAGE_BODY, c.OBJECT_TYPE, c.OBJECT_JSON),
)
"""Of our own attributes those that anybody may say."""
_REASONS: Final = {
    **dict.fromkeys(("tool_call", "tool_use"), "tool_calls"),
    **dict.fromkeys(("stop", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("max_tokens", "length"), "length"),
}
"""Why answers end, in the words of OpenTelemetry and of other providers → in OpenAI's."""

Said = Mapping[str, Any]


def translated(span: Span) -> Span:
    """The span with what it says of a call, a tool, a run or an error in our attributes too."""
    said = {key: value for key, value in span.attributes.items() if _may_be_said(key)}
    more: dict[str, Any] = {}
    if span.kind is SpanKind.LLM:
        more = _call(said)
        twice = (*_TOLD_TWICE, c.TOOL_DEFINITIONS)
        said = {key: said[key] for key in said if not key.startswith(twice)}
    elif span.kind is SpanKind.TOOL:
        more = {
            c.TOOL_NAME: tool_name(span.name, said),
            c.TOOL_CALL_ID: tool_call_id(said),
            c.TOOL_CALL_ARGUMENTS: _given(_first(said, c.TOOL_CALL_ARGUMENTS, *_ARGUMENTS)),
            c.TOOL_CALL_RESULT: _first(said, c.TOOL_CALL_RESULT, *_OUTPUTS),
        }
    else:
        more = {
            c.OPERATION_INPUT: _first(said, c.OPERATION_INPUT, *INPUTS),
            c.OPERATION_OUTPUT: _first(said, c.OPERATION_OUTPUT, *_OUTPUTS),
        }
    if c.ERROR_TYPE not in said:
        kinds = (event.attributes.get(c.EXCEPTION_TYPE) for event in span.events)
        more[c.ERROR_TYPE] = next((kind for kind in kinds if kind), None)
    attributes = {**said, **clean_attributes(more)}
    return span.replace(attributes=attributes, sequence_start=None, sequence_end=None)


def loaded(value: Any) -> Any:
    """Return the JSON of an attribute, or the value itself where it is none."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _may_be_said(key: str) -> bool:
    """Whether a sender may say it. What gateway and runners alone know of a call is none of that:
    readers take it for true, and for well formed."""
    return not key.startswith("lightspan.") or key.startswith(_OURS)


def _first(said: Said, *keys: str) -> Any:
    return next((said[key] for key in keys if key in said), None)


def _given(told: Any) -> Any:
    """A tool's arguments, where OpenInference tells how smolagents called its `Tool` with them."""
    if not (isinstance(told, str) and told.startswith('{"args": []')):
        return told
    try:
        call = json.loads(told)
    except ValueError:
        return told
    if call.keys() != {"args", "kwargs", "sanitize_inputs_outputs"}:
        return told
    return genai_messages.dump_json(call["kwargs"])


def _call(said: Said) -> dict[str, Any]:
    prompt, completion = c.usage_of(said)
    more: dict[str, Any] = {
        c.OPERATION_NAME: said.get(c.OPERATION_NAME, "chat"),
        c.REQUEST_MODEL: c.model_of(said),
        c.INPUT_TOKENS: prompt,
        c.OUTPUT_TOKENS: completion,
        c.TOOL_DEFINITIONS: _tools(said),
    }
    for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        more[key] = _messages(said, key)
    reasons = _reasons(said)
    if reasons:
        more[c.FINISH_REASONS] = [_REASONS.get(reason.lower(), reason) for reason in reasons]
    return more


def _reasons(said: Said) -> list[str]:
    """Why each answer ended, in the sender's words."""
    listed = said.get(c.FINISH_REASONS)
    if isinstance(listed, list):
        return [str(reason) for reason in listed]
    answers = _numbered(said, _OPENLLMETRY[c.OUTPUT_MESSAGES])
    if c.OUTPUT_MESSAGES in said:
        found = loaded(said[c.OUTPUT_MESSAGES])
        answers = (
            [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        )
    reasons = [str(each["finish_reason"]) for each in answers if each.get("finish_reason")]
    return reasons if len(reasons) == len(answers) else []


def _messages(said: Said, key: str) -> str | None:
    """A `gen_ai.*.messages` attribute; None where none of the three says any."""
    if key in said:
        before = _instructions(said) if key == c.INPUT_MESSAGES else []
        return genai_messages.dump_json([*before, *_genai_messages(said[key])])
    dialects: tuple[tuple[str, Callable[[Said], dict[str, Any]]], ...] = (
        (_OPENINFERENCE[key], _openinference_message),
        (_OPENLLMETRY[key], _openllmetry_message),
    )
    for prefix, read in dialects:
        found = _numbered(said, prefix)
        if found:
            return genai_messages.dump(map(read, found))
    return None


def _numbered(said: Said, prefix: str) -> list[dict[str, Any]]:
    """The items of a list that is spread over attributes, `PREFIX.0.rest`: rest → value of each."""
    found: dict[int, dict[str, Any]] = {}
    start = f"{prefix}."
    for key, value in said.items():
        if key.startswith(start):
            number, _, rest = key.removeprefix(start).partition(".")
            if number.isdecimal() and number.isascii() and len(number) < 7:
                found.setdefault(int(number), {})[rest] = value
    return [found[number] for number in sorted(found)]


# --- OpenTelemetry's GenAI conventions ------------------------------------------------------
def _instructions(said: Said) -> list[dict[str, Any]]:
    if INSTRUCTIONS not in said:
        return []
    parts = loaded(said[INSTRUCTIONS])
    if isinstance(parts, str):
        parts = [{"type": "text", "content": parts}]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return []
    return [{"role": "system", "parts": parts}]


def _genai_messages(value: Any) -> list[dict[str, Any]]:
    found = loaded(value)
    whole: list[dict[str, Any]] = []
    for message in found if isinstance(found, list) else [found]:
        parts = message.get("parts") if isinstance(message, dict) else None
        if isinstance(parts, list):
            whole += _split(message, [part for part in parts if isinstance(part, dict)])
        else:
            whole += genai_messages.to_genai([message])
    return whole


def _split(message: dict[str, Any], parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The message, and before it one for each result of a tool, as a chat has them."""
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    others = [_part(part) for part in parts if part.get("type") != "tool_call_response"]
    whole = [{"role": "tool", "parts": [_result(part)]} for part in results]
    if others or not results:
        role = str(message.get("role") or "assistant")
        whole.append({**message, "role": role, "parts": others})
    return whole


def _part(part: dict[str, Any]) -> dict[str, Any]:
    given = part.get("arguments")
    if part.get("type") != "tool_call" or isinstance(given, str):
        return part
    return {**part, "arguments": genai_messages.dump_json({} if given is None else given)}


def _result(part: dict[str, Any]) -> dict[str, Any]:
    response = part.get("response", part.get("result"))
    text = response if isinstance(response, str) else genai_messages.dump_json(response)
    return {"type": "tool_call_response", "id": part.get("id"), "response": text}


# --- OpenInference and OpenLLMetry ----------------------------------------------------------
_ROLES: Final = {"tool-call": "assistant", "tool-response": "user"}
"""smolagents' roles → those that its clients send in their place."""


def _tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    given = arguments if isinstance(arguments, str) else genai_messages.dump_json(arguments or {})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def _message(said: Said, content: Any, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """A chat message of what a dialect calls `role`, `name`, `tool_call_id`, `finish_reason`."""
    kept = {key: said[key] for key in ("name", "tool_call_id", "finish_reason") if said.get(key)}
    role = str(said.get("role") or "assistant")
    role = _ROLES.get(role, role)
    return {"role": role, "content": content, **kept, **({"tool_calls": calls} if calls else {})}


def _openinference_message(said: Said) -> dict[str, Any]:
    own = {key.removeprefix("message."): value for key, value in said.items()}
    calls = [
        _tool_call(
            call.get("tool_call.id"),
            call.get("tool_call.function.name"),
            call.get("tool_call.function.arguments"),
        )
        for call in _numbered(own, "tool_calls")
    ]
    parts = [_openinference_part(part) for part in _numbered(own, "contents")]
    return _message(own, own.get("content", parts or None), calls)


def _openinference_part(said: Said) -> dict[str, Any]:
    image = said.get("message_content.image.image.url")
    if image is not None:
        return {"type": "image_url", "image_url": {"url": str(image)}}
    return {"type": "text", "text": str(said.get("message_content.text", ""))}


def _openllmetry_message(said: Said) -> dict[str, Any]:
    calls = [
        _tool_call(call.get("id"), call.get("name"), call.get("arguments"))
        for call in _numbered(said, "tool_calls")
    ]
    return _message(said, said.get("content"), calls)


def _tools(said: Said) -> str | None:
    """The tools that a call offered, as chat requests have them."""
    found = loaded(said.get(c.TOOL_DEFINITIONS))
    if not isinstance(found, list):
        found = [loaded(tool.get("tool.json_schema")) for tool in _numbered(said, "llm.tools")]
    if not found:
        found = [
            {**tool, "parameters": loaded(tool.get("parameters"))}
            for tool in _numbered(said, "llm.request.functions")
        ]
    tools = [_chat_tool(tool) for tool in found if isinstance(tool, dict)]
    return genai_messages.dump_json(tools) if tools else None


def _chat_tool(tool: Attributes | dict[str, Any]) -> dict[str, Any]:
    if "function" in tool or "name" not in tool:
        return dict(tool)
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {key: tool[key] for key in names if key in tool}}
