"""What was said in a call, where events tell of it and attributes do not: pure.

Until version 1.37 the GenAI conventions had a call's messages as events, one for each; since then
one event may have them all, in the form of today's attributes. Libraries put such events into a
span, or beside it as log records (`logs`), or, as JSON, into one attribute. Here they become the
attributes, and whoever reads a span needs to know of no other form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lightspan.schema import conventions as c, messages
from lightspan.schema.spans import Attributes, SpanEvent, clean_attributes

INSTRUCTIONS: Final = "gen_ai.system_instructions"
CHOICE: Final = "gen_ai.choice"
DETAILS: Final = "gen_ai.client.inference.operation.details"
_PROMPT: Final = "gen_ai.content.prompt"
_COMPLETION: Final = "gen_ai.content.completion"
_WHOLE: Final = {_PROMPT: "gen_ai.prompt", _COMPLETION: "gen_ai.completion"}
"""Events of version 1.27 and before → the attribute in which they have all that was said."""
_ROLES: Final = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
EVENTS: Final = frozenset({*_ROLES, CHOICE, DETAILS, *_WHOLE})
"""Names of those that are read."""
LISTS: Final = ("events", "all_messages_events")
"""Attributes in which Pydantic AI has had them, as JSON."""
_BODIES: Final = ("gen_ai.event.content", "event.body", "body")
"""Attributes of an event that are its body, as JSON."""
_PREFIXES: Final = ("gen_ai.message.", "gen_ai.event.")
"""What libraries put before the fields of a body."""
_FIELDS: Final = ("role", "content", "tool_calls", "tool_call_id", "id", "name", "message")
_OF_BLOCKS: Final = frozenset(
    {
        *("text", "toolUse", "toolResult", "json", "reasoningContent", "image", "document"),
        *("video", "cachePoint", "guardContent", "citationsContent", "interruptResponse"),
    }
)
"""How the blocks of Amazon's Converse API begin, which Strands has as JSON in a text."""
_ELIDED: Final = "<elided>"
"""In place of what ADK may not tell."""
_MOST_MARKS: Final = 300_000
"""Opening brackets and commas: to read more is one long step, for which all of Python waits."""

Chat = dict[str, Any]


def loaded(value: Any) -> Any:
    """The JSON of an attribute; what is none, or too much to read at once, is itself."""
    if isinstance(value, str) and sum(map(value.count, "[{,")) > _MOST_MARKS:
        return value
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def told(events: Iterable[SpanEvent], attributes: Mapping[str, Any]) -> list[SpanEvent]:
    """The events of a span that tell what was said, those in an attribute included."""
    found = [event for event in events if event.name in EVENTS]
    for name in LISTS:
        listed = loaded(attributes.get(name))
        for each in listed if isinstance(listed, list) else []:
            if isinstance(each, dict) and str(each.get("event.name")) in EVENTS:
                body = messages.dump_json(each)
                found.append(SpanEvent(str(each["event.name"]), 0, {"body": body}))
    return found


def heard(events: Iterable[SpanEvent]) -> Attributes:
    """What events tell, as today's attributes say it; nothing of what they do not."""
    asked: list[Chat] = []
    answered: list[Chat] = []
    whole: dict[str, Any] = {}
    for event in events:
        body = _body(event.attributes)
        if event.name == DETAILS:
            keys = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, INSTRUCTIONS, c.TOOL_DEFINITIONS)
            for key in keys:
                if key in body:
                    whole.setdefault(key, _text(body[key]))
        elif event.name == CHOICE:
            answered += _answer(body)
        elif event.name in _ROLES:
            asked += _chat(body, _ROLES[event.name])
        elif event.name in _WHOLE:
            said = loaded(event.attributes.get(_WHOLE[event.name], body.get("content")))
            is_asked = event.name == _PROMPT
            for each in said if isinstance(said, list) else [said]:
                inner = each if isinstance(each, dict) else {"content": each}
                found = _chat(inner, "user") if is_asked else _answer({**inner, "message": inner})
                (asked if is_asked else answered).extend(found)
    for key, chat in ((c.INPUT_MESSAGES, asked), (c.OUTPUT_MESSAGES, answered)):
        if chat:
            whole.setdefault(key, messages.dump(chat))
    return clean_attributes(whole)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else messages.dump_json(value)


def _body(said: Mapping[str, Any]) -> dict[str, Any]:
    """What an event says: in a text, or spread over its attributes, under prefixes or none."""
    found = dict(said)
    for field in _FIELDS:
        for prefix in _PREFIXES:
            name = f"{prefix}{field}"
            if name in said and name not in _BODIES:
                found.setdefault(field, said[name])
    for name in _BODIES:
        if name in said:
            inner = loaded(said[name])
            return {**found, **(inner if isinstance(inner, dict) else {"content": inner})}
    return found


def _answer(body: Mapping[str, Any]) -> list[Chat]:
    given = body.get("message", body.get("content"))
    said = loaded(given)
    is_message = isinstance(said, dict) and said.keys() & {"role", "content", "tool_calls", "parts"}
    inner = {"tool_calls": body.get("tool_calls"), **(said if is_message else {"content": given})}
    found = _chat(inner, "assistant")
    if found and body.get("finish_reason"):
        found[-1]["finish_reason"] = str(body["finish_reason"])
    return found


def _chat(body: Mapping[str, Any], role: str) -> list[Chat]:
    """The chat messages that a message is: what tools gave are messages of their own. None where
    nothing was said, as by a library that may not tell."""
    value = body.get("content", {"parts": body["parts"]} if "parts" in body else None)
    if isinstance(value, dict) and isinstance(value.get("parts"), list):  # Gemini's
        body = {**body, "role": value.get("role") or body.get("role")}
    role = str(body.get("role") or role)
    role = "assistant" if role == "model" else role
    content, calls, results = _content(value)
    calls += _calls(body.get("tool_calls"))
    if role == "tool" and not results:
        call_id = body.get("tool_call_id") or body.get("id")
        given = content if isinstance(content, str) else _text(content)
        results = [] if content is None else [_result(call_id, given)]
        content = None
    if content is None and not calls:
        return results
    named = {"name": str(body["name"])} if body.get("name") else {}
    asked = {"tool_calls": calls} if calls else {}
    role = "user" if role == "tool" else role
    return [*results, {"role": role, **named, "content": content, **asked}]


def _content(value: Any) -> tuple[Any, list[Chat], list[Chat]]:
    """(a message's text, or its parts; the tools that it calls; what tools gave)."""
    if value in (None, {}, _ELIDED):
        return None, [], []
    blocks = _blocks(value)
    if blocks is None:
        return value if isinstance(value, str) else messages.dump_json(value), [], []
    parts: list[Any] = []
    calls: list[Chat] = []
    results: list[Chat] = []
    for block in blocks:
        use = _either(block, "toolUse", "function_call", "functionCall")
        gave = _either(block, "toolResult", "function_response", "functionResponse")
        if use is not None:
            given = _either(use, "input", "args")
            calls.append(_call(_either(use, "toolUseId", "id"), _either(use, "name"), given))
        elif gave is not None:
            given = _either(gave, "content", "response")
            results.append(_result(_either(gave, "toolUseId", "id"), text_of_result(given)))
        else:
            parts.append(_part(block))
    if not parts:
        return None, calls, results
    is_text = len(parts) == 1 and parts[0].get("type") == "text"
    return parts[0]["text"] if is_text else parts, calls, results


def _blocks(value: Any) -> Sequence[Any] | None:
    """The parts of a message; None where it is a text."""
    if isinstance(value, dict):
        parts = value.get("parts")
        return parts if isinstance(parts, list) else None
    if isinstance(value, list):
        return value
    if not isinstance(value, str) or not value.startswith("["):
        return None
    found = loaded(value)  # a user may well write a list: these are known by their keys
    known = isinstance(found, list) and all(
        isinstance(block, dict) and block.keys() & _OF_BLOCKS for block in found
    )
    return found if known and found else None


def _part(block: Any) -> Chat:
    if not isinstance(block, dict):
        return {"type": "text", "text": _text(block)}
    kind = block.get("type", block.get("kind"))
    text = _either(block, "text", "content")
    if kind in (None, "text", "output_text", "input_text") and isinstance(text, str):
        return {"type": "text", "text": text}
    return block if "type" in block else {"type": "text", "text": messages.dump_json(block)}


def _either(block: Any, *names: str) -> Any:
    if not isinstance(block, dict):
        return None
    return next((block[name] for name in names if block.get(name) is not None), None)


def text_of_result(value: Any) -> str:
    """What a tool gave: a text, a block with one, or whatever else as JSON."""
    only = value[0] if isinstance(value, list) and len(value) == 1 else value
    text = _either(only, "text")
    return text if isinstance(text, str) else _text(value)


def _result(call_id: Any, content: str) -> Chat:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _call(call_id: Any, name: Any, arguments: Any) -> Chat:
    given = arguments if isinstance(arguments, str) else messages.dump_json(arguments or {})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def _calls(value: Any) -> list[Chat]:
    found = loaded(value)
    calls = []
    for each in found if isinstance(found, list) else []:
        if isinstance(each, dict):
            function = each.get("function")
            said = function if isinstance(function, dict) else each
            calls.append(_call(each.get("id"), said.get("name"), said.get("arguments")))
    return calls
