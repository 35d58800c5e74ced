"""Repair malformed chunks of endpoints' streams, so that every client reads the same answer.

OpenAI's SDK appends the texts of one field, and the parts of tool calls with the same index. Some
endpoints repeat ids and names in every chunk, give wrong indices to calls, or send lists and
objects where the API has texts. Mistral sends thoughts as parts of the content: they become
`reasoning_content`. Others cut texts inside a character (`half_characters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import msgspec

from lightspan.schema.genai_messages import MAPPING, dump_json, joined_text, mappings_in, to_genai
from lightspan_gateway.half_characters import REPLACEMENT, HalfCharacters

_TEXTS: Final = ("content", "refusal", "reasoning_content", "reasoning")
Json = dict[str, Any]


@dataclass(slots=True)
class _Call:
    """A tool call, as far as its parts have arrived."""

    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class _Calls:
    """The tool calls, and halves of characters, that have arrived for one choice of an answer."""

    calls: list[_Call] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    """The endpoint's index → place in `calls` of the last call with this index."""
    halves: HalfCharacters = field(default_factory=HalfCharacters)
    """Halves of characters in the texts of the choice, and in the arguments of the calls."""


class StreamRepair:
    """Repair the chunks of one stream, or one answer that is not streamed. Never raises."""

    def __init__(self) -> None:
        self._choices: dict[int, _Calls] = {}

    def repaired(self, chunk: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the chunk in the form that the API defines.

        If the chunk has that form already, the same object is returned.
        """
        choices = chunk.get("choices")
        repaired = [self._choice(choice) for choice in mappings_in(choices)]
        return chunk if repaired == (choices or []) else {**chunk, "choices": repaired}

    def repaired_answer(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an answer that is not streamed, in the form that the API defines.

        Texts and the arguments of tool calls are repaired. If the answer has that form already, the
        same object is returned.
        """
        choices = []
        for choice in mappings_in(answer.get("choices")):
            message = choice.get("message")
            if isinstance(message, dict):
                message = _texts(message)
                if message.get("tool_calls") is not None:
                    calls = mappings_in(message["tool_calls"])
                    message["tool_calls"] = [_whole_call(call) for call in calls]
                choice = {**choice, "message": message}
            choices.append(choice)
        is_regular = choices == (answer.get("choices") or [])
        return answer if is_regular else {**answer, "choices": choices}

    def _choice(self, choice: Mapping[str, Any]) -> Json:
        number = choice.get("index")
        index = number if _is_index(number) else 0
        calls, repaired = self._choices.setdefault(index, _Calls()), {**choice, "index": index}
        if "delta" in choice:
            repaired["delta"] = self._delta(calls, choice["delta"])
        if "text" in choice:
            repaired["text"] = calls.halves.join("text", text_of(choice["text"]))
        reason = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            repaired["finish_reason"] = dump_json(reason)
        if reason:
            for name in calls.halves.end():
                _append(repaired, name)
        return repaired

    def _delta(self, calls: _Calls, delta: Any) -> Json:
        repaired = _texts(delta)
        for key in _TEXTS:
            if repaired.get(key):
                repaired[key] = calls.halves.join(key, repaired[key])
        if repaired.get("tool_calls") is not None:
            repaired["tool_calls"] = [
                _call(calls, call) for call in mappings_in(repaired["tool_calls"])
            ]
        return repaired


def _texts(message: Any) -> Json:
    """Return a copy of a message (or of a part of it) whose text fields contain text.

    The result is empty if `message` is not an object.
    """
    repaired: Json = {**message} if isinstance(message, dict) else {}
    parts = repaired.get("content")
    if isinstance(parts, list) and all(_is_part(part) for part in parts):
        repaired["content"] = joined_text(parts)
        own = text_of(repaired.get("reasoning_content") or repaired.get("reasoning"))
        if thought := own or _thoughts_in(parts):
            repaired["reasoning_content"] = thought
    for key in _TEXTS:
        if repaired.get(key) is not None:
            repaired[key] = text_of(repaired[key])
    return repaired


def _is_part(value: Any) -> bool:
    return isinstance(value, MAPPING) and isinstance(value.get("type"), str)


def _thoughts_in(parts: list[Any]) -> str:
    """Return the thoughts among parts of content, as one text."""
    [message] = to_genai([{"role": "assistant", "content": parts}])
    return joined_text([p for p in message["parts"] if p.get("type") == "reasoning"], "content")


def _append(choice: Json, name: str | int) -> None:
    """Append U+FFFD, for half a character, to a text of a choice's last chunk.

    Args:
        choice: the choice in the chunk.
        name: field of the text, or the place of the tool call whose arguments it is.
    """
    delta = choice if name == "text" else choice.setdefault("delta", {})
    if isinstance(name, str):
        delta[name] = (delta.get(name) or "") + REPLACEMENT
    else:
        part = {"index": name, "function": {"arguments": REPLACEMENT}}
        delta["tool_calls"] = [*(delta.get("tool_calls") or ()), part]


def _whole_call(call: Mapping[str, Any]) -> Json:
    repaired = _call(_Calls(), {**call, "index": 0})
    del repaired["index"]
    return {**repaired, **({"index": call["index"]} if "index" in call else {})}


def _call(choice: _Calls, part: Mapping[str, Any]) -> Json:
    """Add a part of a tool call to `choice`; return the part in the form that the API defines."""
    function = part.get("function")
    changed: Json = {**function} if isinstance(function, dict) else {}
    for key in ("name", "arguments"):
        if changed.get(key) is not None:
            changed[key] = text_of(changed[key])
    call_id, name = text_of(part.get("id")), changed.get("name") or ""
    place = _place(choice, part.get("index"), call_id, name)
    repaired = {**part, "index": place}
    if place == len(choice.calls):
        choice.calls.append(_Call())
        repaired = {**repaired, "type": part.get("type") or "function"}
    if changed.get("arguments"):
        changed["arguments"] = choice.halves.join(place, changed["arguments"])
    call = choice.calls[place]
    if call.call_id:  # the SDK would join the ids
        repaired.pop("id", None)
    elif call_id:
        call.call_id = repaired["id"] = call_id
    if name and call.name and (call.arguments or name == call.name):  # the SDK would join them
        del changed["name"]
    else:
        call.name += name
    call.arguments += changed.get("arguments") or ""
    return {**repaired, **({"function": changed} if "function" in part else {})}


def _place(choice: _Calls, index: Any, call_id: str, name: str) -> int:
    """Return the position, in `choice.calls`, of the tool call to which a part belongs.

    If the part begins a new call, the position is the length of the list. A part with an index
    belongs to the last call with this index. It begins a new call if it has a name, and either its
    id differs from that call's id, or it has no id and the arguments so far are complete. A part
    without an index belongs to the call with its id; without an id, to the last call, unless both
    have a name.

    Args:
        choice: the calls so far.
        index: the endpoint's index of the call; None or any other value if it sends no valid index.
        call_id: the call's id in the part; empty if there is none.
        name: the name in the part; empty if there is none.
    """
    calls, new = choice.calls, len(choice.calls)
    if _is_index(index):
        place = choice.places.get(index, new)
        if place < new and name:
            call = calls[place]
            is_other = call.call_id and call_id and call.call_id != call_id
            if is_other or (not call_id and _is_object(call.arguments)):
                place = new
        choice.places[index] = place
        return place
    if not calls:
        return new
    if call_id:
        return next((n for n, call in enumerate(calls) if call.call_id == call_id), new)
    return new if name and calls[-1].name else new - 1


def _is_index(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def text_of(value: Any) -> str:
    """Return a field's value as text: joined if it is a list of texts, else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return joined_text(value) or ("" if value == [] else dump_json(value))


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
