"""Anthropic's Messages API as chat: its blocks as chat messages, its tools as chat tools. Pure.

The gateway understands requests with it, the wire shim records them. Both turn everything into
chat, so that a conversation looks the same whichever of the two an app speaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from lightspan.schema.genai_messages import MAPPING, dump_json
from lightspan.schema.openai_responses import Message, Other

_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "text": frozenset({"type", "text", "cache_control"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
}
"""What a block that has a form in chat may say. `caller` says that the model itself called."""
_ROLES: Final = {"tool_use": "assistant", "tool_result": "user"}
"""Whose message such a block stands in."""
_FINISH: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}
"""Chat's name of a stop reason."""


def is_message_request(body: Mapping[str, Any]) -> bool:
    """Whether the body of a request says what only one for `/v1/messages` does.

    Where it does not, chat would say the same.
    """
    if not isinstance(body.get("messages"), list | tuple):
        return False
    if "system" in body or "stop_sequences" in body:
        return True
    for message in _mappings(body["messages"]):
        content = message.get("content")
        is_text = isinstance(content, str)  # as most are
        if not is_text and any(str(block.get("type")) in _ROLES for block in _mappings(content)):
            return True
    tools = body.get("tools")
    return bool(tools) and any("input_schema" in tool for tool in _mappings(tools))


def _mappings(several: Any) -> list[Mapping[str, Any]]:
    if not isinstance(several, list | tuple):
        return []
    return [one for one in several if isinstance(one, MAPPING)]


def messages_of(body: Mapping[str, Any], other: Other) -> list[Message]:
    """The messages of a request: its system prompt, if any, then what was said.

    Args:
        body: the request.
        other: called for what has no form in chat.
    """
    said: list[Message] = []
    if body.get("system"):
        said.append({"role": "system", "content": _content(body["system"], "system", other)})
    for number, message in enumerate(body.get("messages") or ()):
        said += _turn(message, f"messages[{number}]", other)
    return said


def _turn(message: Any, where: str, other: Other) -> list[Message]:
    """One message as chat has it: the results of tools are messages of their own."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        return [other(message, where)]
    content, where = message.get("content"), f"{where}.content"
    if not isinstance(content, list | tuple):
        return [{"role": role, "content": _content(content, where, other)}]
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
                turn.append({"role": role, "content": _joined(parts)})
                parts = []
            turn.append(_result(block, place, other))
        else:
            parts.append(_part(block, place, other))
    if calls:
        turn.append({"role": role, "content": _joined(parts) or None, "tool_calls": calls})
    elif parts or not turn:
        turn.append({"role": role, "content": _joined(parts)})
    return turn


def _call(block: Mapping[str, Any], where: str, other: Other) -> dict[str, Any]:
    _check(block, where, other)
    given = block.get("input")
    arguments = given if isinstance(given, str) else dump_json({} if given is None else given)
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(block: Mapping[str, Any], where: str, other: Other) -> Message:
    _check(block, where, other)
    content = _content(block.get("content"), f"{where}.content", other)
    result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    # not a field of chat: a template may read it
    return {**result, "is_error": True} if block.get("is_error") else result


def _content(content: Any, where: str, other: Other) -> Any:
    """Text where all blocks are text, else a list of parts; `other` may refuse one."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return other(content, where).get("content")
    return _joined([_part(block, f"{where}[{n}]", other) for n, block in enumerate(content)])


def _joined(parts: Sequence[Any]) -> Any:
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(block: Any, where: str, other: Other) -> Any:
    if isinstance(block, Mapping) and block.get("type") == "text":
        _check(block, where, other)
        if isinstance(block.get("text"), str):
            return block["text"]
    other(block, where)
    return block


def _check(block: Mapping[str, Any], where: str, other: Other) -> None:
    """What a block says beside what chat can say."""
    for key in sorted(block.keys() - _FIELDS[block["type"]]):
        if block[key] is not None:
            other(block[key], f"{where}.{key}")


def tools_to_chat(tools: Sequence[Any]) -> list[Any]:
    """Tools of the app's as chat has them; others as they are."""
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or "input_schema" not in tool:
        return tool
    named = {**tool, "parameters": tool["input_schema"]}
    keys = ("name", "description", "parameters", "strict")
    function = {key: named[key] for key in keys if named.get(key) is not None}
    return {"type": "function", "function": function}


# --- answers --------------------------------------------------------------------------------
def is_message(answer: Mapping[str, Any]) -> bool:
    """Whether an answer is one of the Messages API."""
    return answer.get("type") == "message" and "choices" not in answer


def completion_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a chat completion, for a record."""
    return {
        "id": answer.get("id"),
        "model": answer.get("model"),
        "choices": list(_choices(answer)),
        "usage": _usage(answer.get("usage") or {}),
    }


def _choices(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content, reason = answer.get("content"), answer.get("stop_reason")
    if not content and reason is None:
        return
    said = {"role": "assistant", "content": content}
    [message] = _turn(said, "answer", lambda block, where: {"content": [block]})
    yield {"index": 0, "message": message, "finish_reason": _FINISH.get(str(reason), reason)}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens that were read from a cache, or written to it, were read."""
    keys = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    read = [usage[key] for key in keys if usage.get(key) is not None]
    return {
        "prompt_tokens": sum(read) if read else None,
        "completion_tokens": usage.get("output_tokens"),
    }


class StreamedMessage:
    """The events of a streamed message, gathered into one answer."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {"type": "message"}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, str] = {}
        self.ended = False
        """Whether it has said why it ends: nothing follows."""

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one event."""
        kind, index = event.get("type"), event.get("index", 0)
        delta = event.get("delta") or {}
        if kind == "message_start":
            self._message |= event.get("message") or {}
        elif kind == "content_block_start":
            self._blocks[index] = {**(event.get("content_block") or {})}
        elif kind == "content_block_delta":
            self._extend(index, delta)
        elif kind == "message_delta":
            usage = {
                key: value for key, value in (event.get("usage") or {}).items() if value is not None
            }
            self.ended = True
            self._message |= {**delta, "usage": {**(self._message.get("usage") or {}), **usage}}

    def _extend(self, index: int, delta: Mapping[str, Any]) -> None:
        if delta.get("type") == "input_json_delta":
            written = self._inputs.get(index, "") + str(delta.get("partial_json") or "")
            self._inputs[index] = written
            return
        block = self._blocks.setdefault(index, {"type": "text"})
        for key in ("text", "thinking", "signature"):
            if delta.get(key):
                block[key] = str(block.get(key) or "") + str(delta[key])

    def answer(self) -> dict[str, Any]:
        """The message as if it had not been streamed; as far as it came, if it was cut."""
        content = [
            {**block, "input": _input(self._inputs[index])} if index in self._inputs else block
            for index, block in sorted(self._blocks.items())
        ]
        return {**self._message, "content": content}


def _input(written: str) -> Any:
    try:
        return msgspec.json.decode(written or "{}")
    except (msgspec.DecodeError, RecursionError):  # the stream was cut
        return written
