"""Convert the input and output of a model call, as tracing backends store them, to chat. Pure.

Integrations of a backend store what the app's library had: requests and answers of OpenAI's chat
and Responses APIs, of Anthropic's Messages API, or messages of LangChain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightspan.schema import (
    anthropic_messages as anthropic,
    genai_messages,
    openai_responses as responses,
)
from lightspan.schema.genai_messages import mappings_in

Message = dict[str, Any]

_ITEMS: Final = (
    *("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("reasoning", "web_search_call", "file_search_call", "computer_call", "mcp_call"),
)
"""Types of items of the Responses API that have no role."""
_BLOCKS: Final = ("text", "tool_use", "tool_result", "thinking", "image", "image_url")
"""Types of parts of a message, which a list may have in place of messages."""
_MESSAGE: Final = {"content", "role", "tool_calls"}
"""Fields of which a message has one."""
_LANGCHAIN_ROLES: Final = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
"""Type of a LangChain message without a role → role."""


def chat_of(value: Any, role: str) -> list[Message]:
    """Convert the input or output of a model call into chat messages.

    Args:
        value: a text, a message, a list of messages, items or parts, a request or a response.
        role: role of messages that have none.
    """
    if isinstance(value, Mapping):
        return _of_mapping(value, role)
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return _of_list([item for item in value if _definition(item) is None], role)
    if value is None or value == [] or value == {}:
        return []
    text = value if isinstance(value, str) else genai_messages.dump_json(value)
    return [{"role": role, "content": text}]


def tools_of(value: Any) -> list[Any]:
    """Return the tools in the input of a model call, as in chat requests.

    They are in the field `tools` of a request, or messages of the role `tool` whose content is a
    definition: Langfuse's handler for LangChain stores them in this way.
    """
    if isinstance(value, Mapping):
        tools = value.get("tools")
        listed = tools if isinstance(tools, list) else []
        return anthropic.tools_to_chat(responses.tools_to_chat(listed))
    return [found for item in mappings_in(value) if (found := _definition(item)) is not None]


def _definition(message: Mapping[str, Any]) -> Any:
    """Return the definition of a tool that a message holds; None if it holds none."""
    content = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, Mapping):
        return None
    return content if isinstance(content.get("function"), Mapping) else None


def _of_mapping(value: Mapping[str, Any], role: str) -> list[Message]:
    if isinstance(value.get("messages"), list):
        before = anthropic.messages_of({"system": value.get("system")}, responses.as_it_is)
        return [*before, *chat_of(value["messages"], role)]
    if isinstance(value.get("choices"), list):
        return chat_of(value["choices"], role)
    if isinstance(value.get("message"), Mapping):  # a choice
        reason = value.get("finish_reason")
        extra = {} if reason is None else {"finish_reason": reason}
        return chat_of({**value["message"], **extra}, role)
    if anthropic.is_message(value) and "stop_reason" in value:
        return _answer(anthropic.completion_of(value), has_reason=True)
    if _are_items(value.get("output")):
        return _answer(responses.completion_of(value), has_reason="status" in value)
    if "input" in value and ("instructions" in value or _are_items(value["input"])):
        return responses.messages_of(value, responses.as_it_is)
    if str(value.get("type")) in _ITEMS or _MESSAGE & value.keys():
        return _of_list([value], role)
    return [{"role": role, "content": genai_messages.dump_json(value)}]


def _of_list(items: Sequence[Mapping[str, Any]], role: str) -> list[Message]:
    """Convert messages, items of the Responses API, or the parts of one message."""
    if any(str(item.get("type")) in _ITEMS for item in items):
        if role == "assistant":
            return _answer(responses.completion_of({"output": list(items)}), has_reason=False)
        return responses.items_to_messages(items, responses.as_it_is)
    if items and all("role" not in item and item.get("type") in _BLOCKS for item in items):
        items = [{"content": list(items)}]
    if not all(_MESSAGE & item.keys() for item in items):  # choices, or no messages at all
        return [message for item in items for message in chat_of(item, role)]
    return [message for item in items for message in _of_message(item, role)]


def _of_message(item: Mapping[str, Any], role: str) -> list[Message]:
    """Convert a message of chat, of the Messages API, or of LangChain."""
    message = {"role": _LANGCHAIN_ROLES.get(str(item.get("type")), role), **item}
    if anthropic.is_message_request({"messages": [message]}):
        return anthropic.messages_of({"messages": [message]}, responses.as_it_is)
    extra = message.get("additional_kwargs")
    calls = message.get("tool_calls") or (extra.get("tool_calls") if isinstance(extra, dict) else 0)
    if not isinstance(calls, list) or not calls:
        return [message]
    return [{**message, "tool_calls": [_call(call) for call in calls]}]


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping) or "function" in call or "name" not in call:
        return call
    arguments = call.get("args", call.get("arguments", {}))
    text = arguments if isinstance(arguments, str) else genai_messages.dump_json(arguments)
    function = {"name": call["name"], "arguments": text}
    return {"id": call.get("id"), "type": "function", "function": function}


def _answer(completion: Mapping[str, Any], *, has_reason: bool) -> list[Message]:
    """Return the messages of a completion.

    Args:
        completion: the completion.
        has_reason: whether the answer that it was made of says why it ended.
    """
    return [
        {
            **choice["message"],
            **({"finish_reason": choice["finish_reason"]} if has_reason else {}),
        }
        for choice in completion["choices"]
    ]


def _are_items(value: Any) -> bool:
    """Return whether a value is a list of items of the Responses API."""
    items = value if isinstance(value, list) and value else [None]
    return all(isinstance(each, Mapping) and ("type" in each or "role" in each) for each in items)
