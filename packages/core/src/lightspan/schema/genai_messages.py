"""Convert OpenAI chat messages to OpenTelemetry's GenAI message schema, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from lightspan.schema import semconv as c
from lightspan.schema.media import reference
from lightspan.schema.redaction import clean_text

ChatMessage = Mapping[str, Any]
MAPPING: Final = (dict, Mapping)
"""Types for `isinstance`, which is ten times as fast for a `dict` as with `Mapping` alone."""

CALL_OPEN: Final = "<tool_call>"
CALL_CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
"""Tags of a tool call in a model's text: `CALL_OPEN` and `CALL_CLOSE` enclose a call in the format
of Hermes, `PYTHON_TAG` precedes a call in that of Llama."""

_encode = msgspec.json.Encoder(enc_hook=str).encode


def to_genai(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """Convert OpenAI chat messages to `gen_ai.*.messages`: `{"role": …, "parts": […]}`.

    An item that is not a message becomes a text with the role `unknown`, because invalid requests
    are recorded too. Images, sounds and files are replaced by references (`schema.media`).
    Arguments of tool calls become JSON text.
    """
    return [_to_parts(message) for message in messages]


def from_genai(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert recorded messages to OpenAI chat messages.

    The recorded messages may come from `to_genai` or from other libraries. In the result

    - content is one text, or a list if a part of it is not text,
    - arguments of tool calls are JSON text,
    - the role `developer` has become `system`,
    - thoughts are in `reasoning_content`, and
    - images, sounds and files are still references.
    """
    return [_from_parts(message) for message in messages]


def dump(messages: Iterable[ChatMessage]) -> str:
    """Return OpenAI chat messages as the JSON of a `gen_ai.*.messages` attribute."""
    return dump_json(to_genai(messages))


def dump_json(value: Any) -> str:
    """Return a value as compact JSON. Never raises.

    A part that JSON cannot represent becomes its `str`. If that fails too, the whole value becomes
    the name of its type, such as `"<Answer>"`.
    """
    try:
        return _encode(value).decode()
    except Exception:  # a lone surrogate, a key that is not a text, a cycle, a failing __str__
        pass
    try:  # JSON joins the halves of a surrogate pair
        value = json.loads(json.dumps(value, default=str))
    except Exception:
        value = f"<{type(value).__name__}>"
    return clean_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def load(text: str) -> list[dict[str, Any]]:
    """Return the OpenAI chat messages in a JSON text that `dump` returned."""
    return from_genai(json.loads(text))


def input_messages_of(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that a model call sent, from its span's attributes.

    The list is empty if the messages were not recorded.
    """
    return load(str(attributes.get(c.INPUT_MESSAGES, "[]")))


def output_messages_of(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the answers to a model call, one per choice, from its span's attributes.

    The list is empty if the answers were not recorded.
    """
    return load(str(attributes.get(c.OUTPUT_MESSAGES, "[]")))


def _to_parts(message: Any) -> dict[str, Any]:
    if not isinstance(message, MAPPING):
        return {"role": "unknown", "parts": [{"type": "text", "content": str(message)}]}
    role = _role(message.get("role", "assistant"))
    if role == "tool":
        response = {"type": "tool_call_response", "response": _result(message.get("content"))}
        return {"role": role, "parts": [{**response, "id": message.get("tool_call_id")}]}
    thought = message.get("reasoning_content") or message.get("reasoning")
    parts = [{"type": "reasoning", "content": thought}] if isinstance(thought, str) else []
    parts += _content_parts(message.get("content"))
    parts += map(_call_part, mappings_in(message.get("tool_calls")))
    parts += map(_call_part, mappings_in([message.get("function_call")]))  # of the first API
    if isinstance(message.get("refusal"), str):
        parts.append({"type": "text", "content": message["refusal"]})
    if isinstance(audio := message.get("audio"), MAPPING):
        transcript = audio.get("transcript")
        if isinstance(transcript, str) and transcript:
            parts.append({"type": "text", "content": transcript})
        parts.append(reference({"type": "audio", **audio}))
    name = {"name": message["name"]} if message.get("name") else {}
    reason = message.get("finish_reason")
    return {"role": role, **name, "parts": parts, **({"finish_reason": reason} if reason else {})}


def _content_parts(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, list | tuple):
        return [_content_part(part) for part in content]
    return [{"type": "text", "content": content if isinstance(content, str) else str(content)}]


def _content_part(part: Any) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("type") in ("text", "refusal"):
        return {"type": "text", "content": part.get(part["type"])}
    if isinstance(part, Mapping) and part.get("type") in ("thinking", "reasoning"):
        texts = (joined_text(part.get(key)) for key in ("thinking", "content", "summary"))
        if thought := next(filter(None, texts), ""):  # else it is encrypted
            return {"type": "reasoning", "content": thought}
    return reference(part) if isinstance(part, Mapping) else {"type": "text", "content": str(part)}


def mappings_in(items: Any) -> list[Mapping[str, Any]]:
    """Return the mappings among `items`; an empty list if `items` is not a list."""
    items = items if isinstance(items, list | tuple) else ()
    return [item for item in items if isinstance(item, MAPPING)]


def joined_text(content: Any, key: str = "text") -> str:
    """Return content as one text; `""` if none of it is text.

    Args:
        content: a text or a list of parts.
        key: name of the field that holds the text of a part.
    """
    items = [content] if isinstance(content, str) else content if isinstance(content, list) else ()
    texts = (item.get(key) if isinstance(item, MAPPING) else item for item in items)
    return "".join(text for text in texts if isinstance(text, str))


def _role(value: Any) -> str:
    """Return a role as a text in lower case.

    Some frameworks give a member of an `Enum`, or its name such as `MessageRole.USER`.
    """
    return str(getattr(value, "value", value)).rpartition(".")[2].lower()


def _arguments(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else dump_json(value)


def _result(content: Any) -> Any:
    """Return a tool's result, with references (`media.reference`) for images, sounds and files."""
    if not isinstance(content, list | tuple):
        return content
    return [
        reference(part) if isinstance(part, Mapping) and part.get("type") != "text" else part
        for part in content
    ]


def _call_part(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call.get("custom")  # a custom tool has one text as `input`
    function = function if isinstance(function, MAPPING) else call
    return {
        "type": "tool_call",
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": _arguments(function.get("arguments", function.get("input"))),
    }


def _from_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    role, parts = _role(message["role"]), mappings_in(message.get("parts"))
    role = "system" if role == "developer" else role
    for part in parts:
        if part.get("type") == "tool_call_response":
            content = part.get("response")
            if isinstance(content, list) and all(map(_is_text, content)):
                content = joined_text(content)
            return {"role": role, "tool_call_id": part.get("id"), "content": content}
    thoughts = [part["content"] for part in parts if _is_text(part, "reasoning", "content")]
    calls = [_tool_call(part) for part in parts if part.get("type") == "tool_call"]
    others = [part for part in parts if part.get("type") not in ("tool_call", "reasoning")]
    plain = {"role": role, "content": _from_content(others, has_calls=bool(calls))}
    if thoughts:
        plain["reasoning_content"] = "".join(thoughts)
    named = {"name": message["name"]} if message.get("name") else {}
    return {**plain, **named, **({"tool_calls": calls} if calls else {})}


def _is_text(part: Any, kind: str = "text", key: str = "text") -> bool:
    return isinstance(part, MAPPING) and part.get("type") == kind and isinstance(part.get(key), str)


def _from_content(parts: Sequence[Mapping[str, Any]], *, has_calls: bool) -> Any:
    if all(_is_text(part, "text", "content") for part in parts):
        return None if has_calls and not parts else joined_text(parts, "content")
    return [
        {"type": "text", "text": part.get("content")} if part.get("type") == "text" else dict(part)
        for part in parts
    ]


def _tool_call(part: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": part.get("name"), "arguments": _arguments(part.get("arguments"))}
    return {"id": part.get("id"), "type": "function", "function": function}
