"""OpenAI chat messages ↔ OpenTelemetry's GenAI message schema (role and parts)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from lightspan.schema import semconv as c
from lightspan.schema.media import reference

ChatMessage = Mapping[str, Any]
MAPPING: Final = (dict, Mapping)
"""What is a mapping, for `isinstance`: of a `dict` it says so in a tenth of the time."""

CALL_OPEN: Final = "<tool_call>"
CALL_CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
"""What marks a tool call in the text that a model writes: the first two stand around one in Hermes'
format, the third before one in Llama's."""

_encode = msgspec.json.Encoder(enc_hook=str).encode


def to_genai(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """OpenAI chat messages as `gen_ai.*.messages`: `{"role": …, "parts": […]}`.

    What is no message is kept as text of an `unknown` role, because a request that was refused is
    recorded too. Images, sounds and files become references (`schema.media`).
    """
    return [_to_parts(message) for message in messages]


def from_genai(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The inverse of `to_genai` for text, tool calls and tool results; references stay such."""
    return [_from_parts(message) for message in messages]


def dump(messages: Iterable[ChatMessage]) -> str:
    """OpenAI chat messages as the JSON text of a `gen_ai.*.messages` attribute."""
    return dump_json(to_genai(messages))


def dump_json(value: Any) -> str:
    """Compact JSON that never fails (what JSON cannot say becomes its `str`)."""
    try:
        return _encode(value).decode()
    except Exception:  # a lone surrogate, a key that is no text, a circle, a failing __str__
        return _dump_slowly(value)


def _dump_slowly(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    except Exception:
        text = json.dumps(f"<{type(value).__name__}>")
    return text.encode(errors="replace").decode()


def load(text: str) -> list[dict[str, Any]]:
    """The inverse of `dump`."""
    return from_genai(json.loads(text))


def asked_of(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages that a span's call sent; none if they were not recorded."""
    return load(str(attributes.get(c.INPUT_MESSAGES, "[]")))


def answers_of(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages that a span's call was answered with, one per choice; none if they were not
    recorded."""
    return load(str(attributes.get(c.OUTPUT_MESSAGES, "[]")))


def overrides_of(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Field of a span's request → what the app asked, and what was used in its place."""
    overrides = json.loads(str(attributes.get(c.SAMPLING_OVERRIDES) or "{}"))
    return {field: (asked, used) for field, (asked, used) in overrides.items()}


def _to_parts(message: Any) -> dict[str, Any]:
    if not isinstance(message, MAPPING):
        return {"role": "unknown", "parts": [{"type": "text", "content": str(message)}]}
    role = str(message.get("role", "assistant"))
    if role == "tool":
        response = {"type": "tool_call_response", "response": _result(message.get("content"))}
        return {"role": role, "parts": [{**response, "id": message.get("tool_call_id")}]}
    parts = _content_parts(message.get("content"))
    if message.get("tool_calls"):
        parts += _call_parts(message["tool_calls"])
    if isinstance(message.get("refusal"), str):
        parts.append({"type": "text", "content": message["refusal"]})
    audio = message.get("audio")
    if audio is not None and isinstance(audio, MAPPING):
        parts += _spoken_parts(audio)
    made: dict[str, Any] = {"role": role}
    if message.get("name"):
        made["name"] = message["name"]
    made["parts"] = parts
    if message.get("finish_reason"):
        made["finish_reason"] = message["finish_reason"]
    return made


def _spoken_parts(audio: Mapping[str, Any]) -> list[dict[str, Any]]:
    said = audio.get("transcript")
    text = [{"type": "text", "content": said}] if isinstance(said, str) and said else []
    return [*text, reference({"type": "audio", **audio})]


def _content_parts(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    if isinstance(content, list | tuple):
        return [_content_part(part) for part in content]
    return [{"type": "text", "content": str(content)}]


def _content_part(part: Any) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("type") in ("text", "refusal"):
        return {"type": "text", "content": part.get(part["type"])}
    return reference(part) if isinstance(part, Mapping) else {"type": "text", "content": str(part)}


def _result(content: Any) -> Any:
    """What a tool gave: a text, or parts."""
    if not isinstance(content, list | tuple):
        return content
    return [
        reference(part) if isinstance(part, Mapping) and part.get("type") != "text" else part
        for part in content
    ]


def _call_parts(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        return []
    return [_call_part(call) for call in calls if isinstance(call, Mapping)]


def _call_part(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = {}
    return {
        "type": "tool_call",
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments"),
    }


def _from_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    role, parts = message["role"], message.get("parts", [])
    for part in parts:
        if part.get("type") == "tool_call_response":
            return {"role": role, "tool_call_id": part.get("id"), "content": part.get("response")}
    texts = [part for part in parts if part.get("type") != "tool_call"]
    calls = [_tool_call(part) for part in parts if part.get("type") == "tool_call"]
    plain = {"role": role, "content": _from_content(texts, has_calls=bool(calls))}
    named = {"name": message["name"]} if message.get("name") else {}
    return {**plain, **named, **({"tool_calls": calls} if calls else {})}


def _from_content(parts: Sequence[Mapping[str, Any]], *, has_calls: bool) -> Any:
    if not parts:
        return None if has_calls else ""
    if len(parts) == 1 and parts[0].get("type") == "text":
        return parts[0].get("content")
    return [
        {"type": "text", "text": part.get("content")} if part.get("type") == "text" else dict(part)
        for part in parts
    ]


def _tool_call(part: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": part.get("name"), "arguments": part.get("arguments")}
    return {"id": part.get("id"), "type": "function", "function": function}
