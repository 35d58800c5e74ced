"""Convert Anthropic's Messages API to chat: its blocks, tools, messages and events.

The gateway converts requests to serve them, and the SDK instrumentation to record them, so that
recorded conversations do not depend on the API.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from lightspan.schema import openai_responses as responses
from lightspan.schema.genai_messages import dump_json, mappings_in
from lightspan.schema.openai_responses import Message, Other, join_parts

_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "text": frozenset({"type", "text", "cache_control"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
}
"""Type of a block that chat has too → fields that chat has too, or that have no meaning there."""
_ROLES: Final = {"tool_use": "assistant", "tool_result": "user"}
"""Type of a block → role of the messages that may contain it."""
_FINISH: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}
"""Stop reason → chat's finish reason."""


def is_message_request(body: Mapping[str, Any]) -> bool:
    """Return whether a request's body has fields or blocks that only `/v1/messages` has.

    A body without them has the same meaning as a chat request.
    """
    if not isinstance(body.get("messages"), list | tuple):
        return False
    if "system" in body or "stop_sequences" in body:
        return True
    for message in mappings_in(body["messages"]):
        if any(str(block.get("type")) in _ROLES for block in mappings_in(message.get("content"))):
            return True
    return any("input_schema" in tool for tool in mappings_in(body.get("tools")))


def messages_of(body: Mapping[str, Any], other: Other) -> list[Message]:
    """Convert the system prompt, if there is one, and the messages of a request to chat messages.

    Args:
        body: the request.
        other: called with each block that has no equivalent in chat, and with its path (`Other`).
    """
    messages: list[Message] = []
    if body.get("system"):
        content = responses.convert_content(body["system"], "system", other, _part)
        messages.append({"role": "system", "content": content})
    for number, message in enumerate(body.get("messages") or ()):
        messages += _turn(message, f"messages[{number}]", other)
    return messages


def _turn(message: Any, where: str, other: Other) -> list[Message]:
    """Convert one message of the Messages API to chat messages.

    Each tool result becomes a message. The blocks before, between and after tool results become one
    message each.

    Args:
        where: path of the message in the request, for `other`.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        return [other(message, where)]
    content, where = message.get("content"), f"{where}.content"
    if not isinstance(content, list | tuple):
        return [{"role": role, "content": responses.convert_content(content, where, other, _part)}]
    turn: list[Message] = []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use" and role == _ROLES[kind]:
            calls.append(_call(block, place, other))
        elif kind == "tool_result" and role == _ROLES[kind]:
            if parts:
                turn.append({"role": role, "content": join_parts(parts)})
                parts = []
            turn.append(_result(block, place, other))
        else:
            parts.append(_part(block, place, other))
    if calls:
        turn.append({"role": role, "content": join_parts(parts) or None, "tool_calls": calls})
    elif parts or not turn:
        turn.append({"role": role, "content": join_parts(parts)})
    return turn


def _call(block: Mapping[str, Any], where: str, other: Other) -> dict[str, Any]:
    _check(block, where, other)
    arguments = block.get("input")
    if not isinstance(arguments, str):
        arguments = dump_json({} if arguments is None else arguments)
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(block: Mapping[str, Any], where: str, other: Other) -> Message:
    _check(block, where, other)
    content = responses.convert_content(block.get("content"), f"{where}.content", other, _part)
    result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    # Chat has no such field, but a chat template may read it.
    return {**result, "is_error": True} if block.get("is_error") else result


def _part(block: Any, where: str, other: Other) -> Any:
    if isinstance(block, Mapping) and block.get("type") == "text":
        _check(block, where, other)
        if isinstance(block.get("text"), str):
            return block["text"]
    other(block, where)
    return block


def _check(block: Mapping[str, Any], where: str, other: Other) -> None:
    """Call `other` for each field of a block that has no equivalent in chat.

    Args:
        block: a content block of a message.
        where: path of the block in the request.
        other: called with the field and its path (`Other`).
    """
    for key in sorted(block.keys() - _FIELDS[block["type"]]):
        if block[key] is not None:
            other(block[key], f"{where}.{key}")


def tools_to_chat(tools: Sequence[Any]) -> list[Any]:
    """Convert tools with an `input_schema` to tools of chat; other tools stay as they are."""
    return [
        responses.chat_tool({**tool, "parameters": tool["input_schema"]})
        if isinstance(tool, Mapping) and "input_schema" in tool
        else tool
        for tool in tools
    ]


# --- answers --------------------------------------------------------------------------------
def is_message(answer: Mapping[str, Any]) -> bool:
    """Return whether an answer is a message of the Messages API."""
    return answer.get("type") == "message" and "choices" not in answer


def completion_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an answer of the Messages API to a chat completion, for recording."""
    return responses.as_completion(answer, _choices(answer))


def _choices(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content, reason = answer.get("content"), answer.get("stop_reason")
    if not content and reason is None:
        return
    turn = {"role": "assistant", "content": content}
    [message] = _turn(turn, "answer", lambda block, where: {"content": [block]})
    yield {"index": 0, "message": message, "finish_reason": _FINISH.get(str(reason), reason)}


class StreamedMessage:
    """Assemble a whole message from the events of a streamed message."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {"type": "message"}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, str] = {}
        self.ended = False
        """Whether the stop reason has arrived, after which nothing follows."""

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one event of the stream."""
        kind, index = event.get("type"), event.get("index") or 0
        delta = event.get("delta") or {}
        if kind == "message_start":
            self._message |= event.get("message") or {}
        elif kind == "content_block_start":
            self._blocks[index] = {**(event.get("content_block") or {})}
        elif kind == "content_block_delta":
            self._extend(index, delta)
        elif kind == "message_delta":
            counts = (event.get("usage") or {}).items()
            usage = {key: count for key, count in counts if count is not None}
            self.ended = True
            self._message |= {**delta, "usage": {**(self._message.get("usage") or {}), **usage}}

    def _extend(self, index: int, delta: Mapping[str, Any]) -> None:
        if delta.get("type") == "input_json_delta":
            self._inputs[index] = self._inputs.get(index, "") + str(delta.get("partial_json") or "")
            return
        block = self._blocks.setdefault(index, {"type": "text"})
        for key in ("text", "thinking", "signature"):
            if delta.get(key):
                block[key] = str(block.get(key) or "") + str(delta[key])

    def answer(self) -> dict[str, Any]:
        """Return the message received so far, in the form of an answer without streaming."""
        content = [
            {**block, "input": _input(self._inputs[index])} if index in self._inputs else block
            for index, block in sorted(self._blocks.items())
        ]
        return {**self._message, "content": content}


def _input(text: str) -> Any:
    try:
        return msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):  # the stream was cut off
        return text
