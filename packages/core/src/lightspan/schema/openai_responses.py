"""Convert items, tools, responses and events of OpenAI's Responses API to those of chat.

The gateway converts requests to answer them. The SDK instrumentation converts requests and
responses to record them, so that recorded conversations have the same form for both APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import dump_json

Message = dict[str, Any]

TEXT_PARTS: Final = ("input_text", "output_text", "text")
ENDS: Final = ("response.completed", "response.incomplete", "response.failed")
"""Types of the last event of a stream. The last event has the whole response."""


Other = Callable[[Any, str], Message]
"""A function that is called with an item that has no equivalent in chat, and with the item's path
in the request. It raises an error to refuse the item, or returns a message to use instead; an empty
one leaves the item out. For a part of a message's content, the returned message is ignored and the
part stays as it is."""


def is_response(body: Mapping[str, Any]) -> bool:
    """Return whether a request's body is for `/v1/responses`."""
    return "messages" not in body and ("input" in body or "instructions" in body)


def messages_of(body: Mapping[str, Any], other: Other) -> list[Message]:
    """Convert the instructions, if any, and the input of a request to chat messages."""
    return [*instructions_of(body), *items_to_messages(body.get("input"), other)]


def context_attributes(body: Mapping[str, Any]) -> dict[str, str | bool]:
    """Return what a request says of its prompt: `semconv.CALL_CONTEXT` and `INSTRUCTIONS`."""
    names = [name for name in ("prompt", "conversation") if body.get(name) is not None]
    context = [*names, str(body.get("previous_response_id") or "")][0]
    has_instructions = {c.INSTRUCTIONS: True} if body.get("instructions") else {}
    return {**has_instructions, **({c.CALL_CONTEXT: context} if context else {})}


def instructions_of(body: Mapping[str, Any]) -> list[Message]:
    """Return a list with the system message that holds a request's instructions.

    The list is empty if the request has no instructions.
    """
    instructions = body.get("instructions")
    return [{"role": "system", "content": instructions}] if instructions else []


def items_to_messages(items: Any, other: Other) -> list[Message]:
    """Convert input or output items to chat messages.

    A call of a tool is added to the assistant's message just before it, because the model wrote
    both in one turn. A custom tool takes a text, which becomes the argument `input`. The name of a
    tool in a namespace becomes `namespace.name`.

    Args:
        items: a text, an array of items, or None for no items.
        other: function that converts an item for which chat has no equivalent. Its arguments are
            the item and the path of the item in the request.
    """
    if items is None:
        return []
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list | tuple):
        return [other(items, "input")]
    messages: list[Message] = []
    for number, item in enumerate(items):
        _add_item(messages, item, f"input[{number}]", other)
    return messages


def _add_item(messages: list[Message], item: Any, where: str, other: Other) -> None:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind in ("function_call", "custom_tool_call") and isinstance(item.get("name"), str):
        _add_call(messages, item)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = _content(item.get("output"), f"{where}.output", other)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind in (None, "message") and isinstance(item, Mapping) and "role" in item:
        content = _content(item.get("content"), f"{where}.content", other)
        messages.append({"role": item["role"], "content": content})
    else:
        messages.extend(filter(None, [other(item, where)]))


def _add_call(messages: list[Message], item: Mapping[str, Any]) -> None:
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    arguments = dump_json({"input": item["input"]}) if "input" in item else item.get("arguments")
    function = {"name": chat_name(item), "arguments": arguments or ""}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def chat_name(item: Mapping[str, Any]) -> str:
    """Return the name in chat of a tool, or of the tool that a call names."""
    return ".".join(str(item[key]) for key in ("namespace", "name") if item.get(key))


def _content(content: Any, where: str, other: Other) -> Any:
    return convert_content(content, where, other, _part)


def convert_content(
    content: Any, where: str, other: Other, convert_part: Callable[[Any, str, Other], Any]
) -> Any:
    """Convert the content of a message to a text, or to a list of parts.

    It becomes a text if all of its parts are texts.

    Args:
        content: a text, a list of parts, or anything else for `other`.
        where: path of the content in the request.
        other: function that converts content that is neither a text nor a list. Its arguments are
            the content and `where`.
        convert_part: function of a part, its path and `other`. It returns a text, or a part to
            keep.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return other(content, where).get("content")
    parts = [convert_part(each, f"{where}[{n}]", other) for n, each in enumerate(content)]
    return join_parts(parts)


def join_parts(parts: Sequence[Any]) -> Any:
    """Return parts as one text if all of them are texts, else as a list of chat's content parts."""
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: Any, where: str, other: Other) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"]
    other(part, where)
    return part


def as_it_is(item: Any, where: str) -> Message:
    """Return a message that contains `item` unchanged.

    Pass this function as `other` to the functions that convert items, to record every item.
    """
    role = item.get("role") if isinstance(item, Mapping) else None
    return {"role": role or "unknown", "content": [item]}


def tools_to_chat(tools: Sequence[Any]) -> list[Any]:
    """Convert function tools to those of chat; other tools stay as they are."""
    return [
        chat_tool(tool)
        if isinstance(tool, Mapping) and tool.get("type") == "function" and "function" not in tool
        else tool
        for tool in tools
    ]


def chat_tool(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function tool of chat, made from `fields`.

    Fields that a function of chat does not have, and fields that are None, are left out.
    """
    keys = ("name", "description", "parameters", "strict")
    function = {key: fields[key] for key in keys if fields.get(key) is not None}
    return {"type": "function", "function": function}


# --- answers --------------------------------------------------------------------------------
def completion_of(response: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a response to a chat completion, for recording."""
    return as_completion(response, _choices(response))


def as_completion(answer: Mapping[str, Any], choices: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return a response, or a message of the Messages API, as a chat completion with `choices`.

    Tokens read from or written to a cache, which the Messages API counts separately, count as
    prompt tokens.
    """
    usage = answer.get("usage") or {}
    keys = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    counts = [usage[key] for key in keys if usage.get(key) is not None]
    prompt, completion = sum(counts) if counts else None, usage.get("output_tokens")
    return {
        "id": answer.get("id"),
        "model": answer.get("model"),
        "choices": list(choices),
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


def _choices(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    output = items_to_messages(list(response.get("output") or ()), as_it_is)
    if not output:
        return
    yield {"index": 0, "message": _merged(output), "finish_reason": _finish(response, output)}


def _merged(messages: list[Message]) -> Message:
    """Merge the assistant's messages in one answer into a single message."""
    contents = [m["content"] for m in messages if m.get("content")]
    texts = [content for content in contents if isinstance(content, str)]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    content: Any = "".join(texts) or None
    if parts:
        content = [*parts, *({"type": "text", "text": text} for text in texts)]
    merged = {"role": "assistant", "content": content}
    return {**merged, "tool_calls": calls} if calls else merged


def _finish(response: Mapping[str, Any], output: list[Message]) -> str | None:
    if response.get("status") in ("queued", "in_progress"):  # the stream was cut off
        return None
    if response.get("status") == "incomplete":
        reason = (response.get("incomplete_details") or {}).get("reason")
        return "length" if reason == "max_output_tokens" else str(reason or "incomplete")
    return "tool_calls" if any(message.get("tool_calls") for message in output) else "stop"


class StreamedResponse:
    """Assemble a whole response from the events of a streamed response."""

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._items: dict[int, Mapping[str, Any]] = {}
        self._texts: dict[int, str] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self.ended = False
        """Whether the whole response has arrived."""

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one event of the stream."""
        kind, response = event.get("type"), event.get("response")
        if isinstance(response, Mapping):
            self._response = dict(response)
            self.ended = kind in ENDS
        elif kind == "response.output_item.done":
            self._items[event.get("output_index") or 0] = event.get("item") or {}
        elif kind in ("response.output_text.delta", "response.refusal.delta"):
            index = event.get("output_index") or 0
            self._texts[index] = self._texts.get(index, "") + str(event.get("delta") or "")
        elif kind == "response.output_item.added":
            item = event.get("item") or {}
            if item.get("type") == "function_call":
                self._calls[event.get("output_index") or 0] = {**item, "arguments": ""}
        elif kind == "response.function_call_arguments.delta":
            call = self._calls.get(event.get("output_index") or 0, {})
            call["arguments"] = call.get("arguments", "") + str(event.get("delta") or "")

    def answer(self) -> dict[str, Any]:
        """Return the response received so far, in the form that it would have without streaming."""
        if self.ended:
            return self._response
        message = {"type": "message", "role": "assistant"}
        texts = {index: {**message, "content": text} for index, text in self._texts.items()}
        output = [item for _, item in sorted({**texts, **self._calls, **self._items}.items())]
        return {**self._response, "status": "in_progress", "output": output}
