"""Translate the span attributes of other libraries into ours. Pure.

OpenTelemetry's GenAI conventions, OpenInference and OpenLLMetry each have their own attributes for
messages, tools, arguments and errors. Readers of stored spans expect those of
`lightspan.schema.genai_attributes`. The original of a translated attribute is not stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.content import without_keys
from lightspan.schema.media import images_into, reference
from lightspan.schema.redaction import bounded_text, values_without_keys
from lightspan.schema.spans import (
    Attributes,
    Span,
    SpanEvent,
    SpanKind,
    SpanStatus,
    clean_attributes,
)
from lightspan_otel.agent_names import tool_call_id, tool_name
from lightspan_otel.otlp import ReceivedSpan

INSTRUCTIONS: Final = "gen_ai.system_instructions"
_OPENINFERENCE: Final = {
    c.INPUT_MESSAGES: "llm.input_messages",
    c.OUTPUT_MESSAGES: "llm.output_messages",
}
MESSAGES: Final = {c.INPUT_MESSAGES, c.OUTPUT_MESSAGES}
"""Attributes of which a model call has one, unless its span is without content."""
_OPENINFERENCE_REASON: Final = "llm.finish_reason"
_OPENLLMETRY: Final = {c.INPUT_MESSAGES: "gen_ai.prompt", c.OUTPUT_MESSAGES: "gen_ai.completion"}
INPUTS: Final = ("input.value", "traceloop.entity.input")
"""Attributes that may hold the input of an agent, a tool or another operation."""
_OUTPUTS: Final = ("output.value", "traceloop.entity.output")
_ARGUMENTS: Final = ("tool_call.function.arguments", *INPUTS, "tool.parameters")
"""Attributes with the arguments of a tool; the last may hold the arguments' schema instead."""
_REDUNDANT: Final = (
    *("llm.input_messages.", "llm.output_messages.", "llm.tools.", "llm.request.functions."),
    *("gen_ai.prompt.", "gen_ai.completion."),
)

_PUBLIC_ATTRIBUTES: Final = (
    *(c.AGENT_PATH, c.OPERATION_INPUT, c.OPERATION_OUTPUT, c.FEEDBACK, c.ANNOTATION),
    *("lightspan.reward.", c.MESSAGE_BODY, c.OBJECT_TYPE, c.OBJECT_JSON),
)
"""Prefixes of our own attributes that any sender may set."""
_REASONS: Final = {
    **dict.fromkeys(("tool_call", "tool_use"), "tool_calls"),
    **dict.fromkeys(("stop", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("max_tokens", "length"), "length"),
}
"""Finish reasons of OpenTelemetry and of other providers → OpenAI's."""

AttributeMap = Mapping[str, Any]


def normalized_arrival(arrival: ReceivedSpan) -> ReceivedSpan:
    """Return a received span with its attributes translated (`normalized`), and with its images."""
    found = {image.digest: image for image in arrival.images}
    with images_into(found):
        span = normalized(arrival.span)
    return arrival._replace(span=span, images=tuple(found.values()))


def normalized(span: Span) -> Span:
    """Return a copy of a span with its attributes translated into ours.

    Attributes that a sender may not set (`_is_allowed`) and sequence numbers are dropped. API keys
    in messages and errors are replaced.
    """
    attributes = {key: value for key, value in span.attributes.items() if _is_allowed(key)}
    translated: dict[str, Any] = {}
    if span.kind is SpanKind.LLM:
        translated = _call(attributes)
        redundant = (*_REDUNDANT, c.TOOL_DEFINITIONS)
        attributes = {key: attributes[key] for key in attributes if not key.startswith(redundant)}
    elif span.kind is SpanKind.TOOL:
        translated = {
            c.TOOL_NAME: tool_name(span.name, attributes),
            c.TOOL_CALL_ID: tool_call_id(attributes),
            c.TOOL_CALL_ARGUMENTS: _tool_arguments(
                _first(attributes, c.TOOL_CALL_ARGUMENTS, *_ARGUMENTS)
            ),
            c.TOOL_CALL_RESULT: _first(attributes, c.TOOL_CALL_RESULT, *_OUTPUTS),
        }
    else:
        translated = {
            c.OPERATION_INPUT: _first(attributes, c.OPERATION_INPUT, *INPUTS),
            c.OPERATION_OUTPUT: _first(attributes, c.OPERATION_OUTPUT, *_OUTPUTS),
        }
    if c.ERROR_TYPE not in attributes:
        kinds = (event.attributes.get(c.EXCEPTION_TYPE) for event in span.events)
        translated[c.ERROR_TYPE] = next((kind for kind in kinds if kind), None)
    # a sender sets the attribute of an operation that failed, and may leave out the status
    has_failed = span.status is SpanStatus.UNSET and bool(attributes.get(c.ERROR_TYPE))
    attributes |= clean_attributes(translated)
    return without_keys(
        span.replace(
            attributes=attributes,
            status=SpanStatus.ERROR if has_failed else span.status,
            status_message=bounded_text(span.status_message),
            events=[_without_keys(event) for event in span.events],
            sequence_start=None,
            sequence_end=None,
        )
    )


def _without_keys(event: SpanEvent) -> SpanEvent:
    is_error = c.EXCEPTION_TYPE in event.attributes
    clean = bounded if is_error else values_without_keys  # other events may hold whole messages
    return SpanEvent(event.name, event.time_ns, clean(event.attributes))


def bounded(attributes: AttributeMap) -> Attributes:
    """Shorten an exception's attributes and remove API keys, which its message may quote."""
    return {k: bounded_text(v) if isinstance(v, str) else v for k, v in attributes.items()}


def loaded(value: Any) -> Any:
    """Return the decoded JSON of an attribute, or the value itself if it is not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _is_allowed(key: str) -> bool:
    """Return whether a sender of spans may set the attribute `key`.

    Attributes that only the gateway and runners set are excluded, because readers trust them.
    """
    return not key.startswith("lightspan.") or key.startswith(_PUBLIC_ATTRIBUTES)


def _first(attributes: AttributeMap, *keys: str) -> Any:
    return next((attributes[key] for key in keys if key in attributes), None)


def _tool_arguments(value: Any) -> Any:
    """Return a tool's arguments.

    OpenInference records a call of smolagents as JSON with the fields `args` and `kwargs`. For this
    form, `kwargs` is returned as JSON. Any other value is returned unchanged.
    """
    if not (isinstance(value, str) and value.startswith('{"args": []')):
        return value
    try:
        call = json.loads(value)
    except ValueError:
        return value
    if call.keys() != {"args", "kwargs", "sanitize_inputs_outputs"}:
        return value
    return genai_messages.dump_json(call["kwargs"])


def _call(attributes: AttributeMap) -> dict[str, Any]:
    prompt, completion = c.usage_of(attributes)
    translated: dict[str, Any] = {
        c.OPERATION_NAME: attributes.get(c.OPERATION_NAME, "chat"),
        c.REQUEST_MODEL: c.model_of(attributes),
        c.INPUT_TOKENS: prompt,
        c.OUTPUT_TOKENS: completion,
        c.TOOL_DEFINITIONS: _tools(attributes),
    }
    for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        translated[key] = _messages(attributes, key)
    reasons = _reasons(attributes)
    if reasons:
        translated[c.FINISH_REASONS] = [_REASONS.get(reason.lower(), reason) for reason in reasons]
    return translated


def _reasons(attributes: AttributeMap) -> list[str]:
    """Return the reason why each answer ended, as the sender wrote it.

    The result is empty if the reason of an answer is missing.
    """
    listed = attributes.get(c.FINISH_REASONS)
    if isinstance(listed, list):
        return [str(reason) for reason in listed]
    answers = _numbered(attributes, _OPENLLMETRY[c.OUTPUT_MESSAGES])
    if c.OUTPUT_MESSAGES in attributes:
        messages = loaded(attributes[c.OUTPUT_MESSAGES])
        answers = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    reasons = [str(answer["finish_reason"]) for answer in answers if answer.get("finish_reason")]
    if not reasons and (only := attributes.get(_OPENINFERENCE_REASON)):
        return [str(only)]
    return reasons if len(reasons) == len(answers) else []


def _messages(attributes: AttributeMap, key: str) -> str | None:
    """Return the messages of the attribute `key` as JSON, such as `gen_ai.input.messages`.

    If the attribute is missing, translate the messages from OpenInference or OpenLLMetry; None if
    there are no messages.
    """
    if key in attributes:
        before = _instructions(attributes) if key == c.INPUT_MESSAGES else []
        return genai_messages.dump_json([*before, *_genai_messages(attributes[key])])
    dialects: tuple[tuple[str, Callable[[AttributeMap], dict[str, Any]]], ...] = (
        (_OPENINFERENCE[key], _openinference_message),
        (_OPENLLMETRY[key], _openllmetry_message),
    )
    for prefix, read in dialects:
        items = _numbered(attributes, prefix)
        if items:
            return genai_messages.dump(map(read, items))
    return None


def _numbered(attributes: AttributeMap, prefix: str) -> list[dict[str, Any]]:
    """Collect attributes `PREFIX.NUMBER.NAME` into a list, with a mapping NAME → value per NUMBER.

    The list is sorted by NUMBER.
    """
    items: dict[int, dict[str, Any]] = {}
    start = f"{prefix}."
    for key, value in attributes.items():
        if key.startswith(start):
            number, _, rest = key.removeprefix(start).partition(".")
            if number.isdecimal() and number.isascii() and len(number) < 7:
                items.setdefault(int(number), {})[rest] = value
    return [items[number] for number in sorted(items)]


# --- OpenTelemetry's GenAI conventions ------------------------------------------------------
def _instructions(attributes: AttributeMap) -> list[dict[str, Any]]:
    if INSTRUCTIONS not in attributes:
        return []
    parts = loaded(attributes[INSTRUCTIONS])
    if isinstance(parts, str):
        parts = [{"type": "text", "content": parts}]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return []
    return [{"role": "system", "parts": parts}]


def _genai_messages(value: Any) -> list[dict[str, Any]]:
    items = loaded(value)
    whole: list[dict[str, Any]] = []
    for message in items if isinstance(items, list) else [items]:
        parts = message.get("parts") if isinstance(message, dict) else None
        if isinstance(parts, list):
            whole += _split(message, [part for part in parts if isinstance(part, dict)])
        else:
            whole += genai_messages.to_genai([message])
    return whole


def _split(message: dict[str, Any], parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split a message: one message per tool result in `parts`, then one with all other parts.

    In a chat, each tool result must be a message of its own.
    """
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    others = [_part(part) for part in parts if part.get("type") != "tool_call_response"]
    whole = [{"role": "tool", "parts": [_result(part)]} for part in results]
    if others or not results:
        role = str(message.get("role") or "assistant")
        whole.append({**message, "role": role, "parts": others})
    return whole


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "blob" and part.get("content"):  # the bytes, in base64
        kinds = {"image": "image", "audio": "audio", "video": "video"}
        kind = kinds.get(str(part.get("modality")), "file")
        return reference({**part, "type": kind, "data": part["content"]})
    arguments = part.get("arguments")
    if part.get("type") != "tool_call" or isinstance(arguments, str):
        return part
    return {**part, "arguments": genai_messages.dump_json({} if arguments is None else arguments)}


def _result(part: dict[str, Any]) -> dict[str, Any]:
    response = part.get("response", part.get("result"))
    text = response if isinstance(response, str) else genai_messages.dump_json(response)
    return {"type": "tool_call_response", "id": part.get("id"), "response": text}


# --- OpenInference and OpenLLMetry ----------------------------------------------------------
_ROLES: Final = {"tool-call": "assistant", "tool-response": "user"}
"""Role in smolagents → role that its clients send."""


def _tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else genai_messages.dump_json(arguments or {})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _message(attributes: AttributeMap, content: Any, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Build a chat message; other fields, such as `role` and `name`, are in `attributes`."""
    optional = {
        key: attributes[key]
        for key in ("name", "tool_call_id", "finish_reason")
        if attributes.get(key)
    }
    role = str(attributes.get("role") or "assistant")
    role = _ROLES.get(role, role)
    return {
        "role": role,
        "content": content,
        **optional,
        **({"tool_calls": calls} if calls else {}),
    }


def _openinference_message(attributes: AttributeMap) -> dict[str, Any]:
    fields = {key.removeprefix("message."): value for key, value in attributes.items()}
    calls = [
        _tool_call(
            call.get("tool_call.id"),
            call.get("tool_call.function.name"),
            call.get("tool_call.function.arguments"),
        )
        for call in _numbered(fields, "tool_calls")
    ]
    parts = [_openinference_part(part) for part in _numbered(fields, "contents")]
    return _message(fields, fields.get("content", parts or None), calls)


def _openinference_part(attributes: AttributeMap) -> dict[str, Any]:
    image = attributes.get("message_content.image.image.url")
    if image is not None:
        return {"type": "image_url", "image_url": {"url": str(image)}}
    return {"type": "text", "text": str(attributes.get("message_content.text", ""))}


def _openllmetry_message(attributes: AttributeMap) -> dict[str, Any]:
    calls = [
        _tool_call(call.get("id"), call.get("name"), call.get("arguments"))
        for call in _numbered(attributes, "tool_calls")
    ]
    return _message(attributes, attributes.get("content"), calls)


def _tools(attributes: AttributeMap) -> str | None:
    """Return the tools offered by a call, as JSON like in chat requests; None for no tools."""
    items = loaded(attributes.get(c.TOOL_DEFINITIONS))
    if not isinstance(items, list):
        items = [
            loaded(tool.get("tool.json_schema")) for tool in _numbered(attributes, "llm.tools")
        ]
    if not items:
        items = [
            {**tool, "parameters": loaded(tool.get("parameters"))}
            for tool in _numbered(attributes, "llm.request.functions")
        ]
    tools = [_chat_tool(tool) for tool in items if isinstance(tool, dict)]
    return genai_messages.dump_json(tools) if tools else None


def _chat_tool(tool: Attributes | dict[str, Any]) -> dict[str, Any]:
    if "function" in tool or "name" not in tool:
        return dict(tool)
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {key: tool[key] for key in names if key in tool}}
