"""Anthropic's Messages API, `/v1/messages`. Nothing here does I/O.

Content blocks are converted to chat messages (`schema.anthropic_messages`), so that a conversation
has the same tokens as in a chat completions request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from lightspan.schema import semconv as c
from lightspan.schema.anthropic_messages import messages_of, tools_to_chat
from lightspan.schema.media import is_media
from lightspan.schema.records import Mode
from lightspan.schema.token_records import Sampling
from lightspan_gateway.api_errors import ApiError, bad_request
from lightspan_gateway.dialects import base as shared
from lightspan_gateway.dialects.base import Answer, Choice, Message, MessagesRequest
from lightspan_gateway.dialects.constraints import RequestField, read_tools
from lightspan_gateway.dialects.image_parts import ImagePart
from lightspan_gateway.dialects.sse import Events, TypedEvents, event_of

RULES: Final = shared.FieldRules(
    types={
        **shared.SHARED_TYPES,
        **dict.fromkeys(("messages", "tools", "stop_sequences"), (list,)),
        **dict.fromkeys(("tool_choice", "thinking", "output_config", "output_format"), (dict,)),
        "system": (str, list),
    },
    supported=frozenset(
        {
            *("model", "stream", "temperature", "top_p", "top_k", "max_tokens", "stop_sequences"),
            *("messages", "system", "tools", "tool_choice", "chat_template_kwargs"),
            *("output_config", "output_config.format", "output_format", "thinking"),
            "cache_control",  # does not affect the answer
        }
    ),
    defaults={
        "context_management": (None, {}),
        "mcp_servers": (None, []),
        "speed": ("standard", None),
    },
    nested={"output_config": {}},
    refused=("compaction", "container", "mcp_servers", "thread"),
    stop="stop_sequences",
)
_TOOL_RULES: Final = shared.FieldRules(
    types={},
    supported=frozenset(
        {
            *("type", "name", "description", "input_schema", "strict"),
            *("cache_control", "eager_input_streaming"),  # do not affect the answer
        }
    ),
    defaults={
        "allowed_callers": (["direct"], None),
        "defer_loading": (False, None),
        "input_examples": ([], None),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(MessagesRequest):
    """A request of the Messages API; its answer has one choice."""

    prompt_field: ClassVar[str] = "messages"
    chunk_object: ClassVar[str] = "message"
    id_prefix: ClassVar[str] = "msg_"
    framing: ClassVar[type[Events]] = TypedEvents

    # --- answers --------------------------------------------------------------------------
    def body(self, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        base = {"id": answer.response_id, "model": answer.model}
        usage = _usage(len(answer.prompts[0]), len(choice.token_ids))
        return {**_message(base, usage), "content": _content(choice), **_stop(choice)}

    # --- streams --------------------------------------------------------------------------
    def opening(
        self, base: Mapping[str, Any], index: int, prompt: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": _message(base, _usage(len(prompt), 0))}
        yield {"type": "ping"}

    def begin_text(self, base: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
        yield _start(0, {"type": "text", "text": ""})

    def delta(self, base: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
        return _delta(0, {"type": "text_delta", "text": text})

    def last(self, answer: Answer, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        choice = answer.choices[0]
        calls = iter(choice.message.get("tool_calls") or ())
        for number, block in enumerate(_content(choice)):
            if block["type"] == "tool_use":
                arguments = next(calls)["function"]["arguments"]
                yield _start(number, {**block, "input": {}})
                yield _delta(number, {"type": "input_json_delta", "partial_json": arguments})
            elif not block["text"]:  # no text was streamed, so no block has begun
                yield from self.begin_text(base, choice.index)
            yield {"type": "content_block_stop", "index": number}
        usage = _usage(len(answer.prompts[0]), len(choice.token_ids))
        yield {"type": "message_delta", "delta": _stop(choice), "usage": usage}
        yield {"type": "message_stop"}


def _start(number: int, block: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": number, "content_block": block}


def _delta(number: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": number, "delta": delta}


def _message(base: Mapping[str, Any], usage: Mapping[str, int]) -> dict[str, Any]:
    """Return an assistant message of the Messages API with empty content.

    `base` has the fields `id` and `model`; `usage` has the numbers of tokens.
    """
    return {
        "id": base["id"],
        "type": "message",
        "role": "assistant",
        "model": base["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _content(choice: Choice) -> list[dict[str, Any]]:
    """Return the content blocks of a choice: its text, then its tool calls.

    If the choice has neither, return one empty text block, because clients expect a block.
    """
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": msgspec.json.decode(call["function"]["arguments"]),
        }
        for call in choice.message.get("tool_calls") or ()
    ]
    text = choice.message.get("content") or ""
    return [{"type": "text", "text": text}, *calls] if text or not calls else calls


def _stop(choice: Choice) -> dict[str, str | None]:
    reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    reason, stop = reasons[choice.finish_reason], choice.stop
    if stop is None or reason == "tool_use":
        return {"stop_reason": reason, "stop_sequence": None}
    return {"stop_reason": "stop_sequence", "stop_sequence": stop}


def _usage(prompt: int, answer: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **cached, "output_tokens": answer}


# --- errors ---------------------------------------------------------------------------------
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def message_error(error: ApiError, request_id: str | None) -> bytes:
    """Return the JSON of an error in Anthropic's format.

    The error code is in the field `details`, which Anthropic's SDK shows.
    """
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    details: dict[str, Any] = {"type": _KINDS.get(error.status, kind), "message": error.message}
    if error.code is not None:
        details["details"] = {"error_code": error.code}
    return msgspec.json.encode({"type": "error", "error": details, "request_id": request_id})


def message_error_event(payload: bytes) -> bytes:
    """Return the server-sent event `error` with the JSON `payload` of an error.

    The event is named, because clients ignore events without a name.
    """
    return b"event: error\n" + event_of(payload)


# --- requests -------------------------------------------------------------------------------
def parse_message(
    body: Mapping[str, Any], *, mode: Mode, forced: Sampling | None
) -> MessageRequest:
    """Parse the body of a Messages request.

    See `lightspan_gateway.dialects.chat.parse_chat` for the arguments.

    Raises:
        ApiError: 400 naming the field that is missing, invalid or unsupported.
    """
    if body.get("max_tokens") is None:
        raise bad_request(
            "'max_tokens' is missing: set the maximum length of an answer", "max_tokens"
        )

    def adjust(unsupported: dict[str, Any]) -> None:
        thinking = body.get("thinking") or {}
        if thinking.get("type", "disabled") != "disabled":
            unsupported["thinking"] = thinking

    fields = shared.read_fields(body, RULES, mode, forced, adjust)
    messages, tools = _messages(body), _tools(body)
    return MessageRequest(
        **fields,
        **read_tools(body, tools, _format(body), _tool_choice(body.get("tool_choice") or {})),
        messages=messages,
    )


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not messages:
        raise bad_request("'messages' must be a non-empty array", "messages")
    last = messages[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        where = f"messages[{len(messages) - 1}]"
        raise bad_request(
            f"{where} is the assistant's: this endpoint cannot continue a prefilled answer; end "
            "with a message of the user",
            where,
        )
    return messages_of(body, _refuse_block)


def _refuse_block(block: Any, where: str) -> Message:
    if isinstance(block, ImagePart):
        return {}
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    raise bad_request(
        f"{where} is of type {kind!r}: only text, tool calls and their results are supported"
        f"{shared.images_advice(kind, 'image')}",
        where,
        c.UNSUPPORTED_CONTENT if is_media(block) else None,
    )


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools") or None
    for number, tool in enumerate(tools or ()):
        where = f"tools[{number}]"
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        if kind not in (None, "custom"):
            raise bad_request(
                f"{where} is of type {kind!r}: only the app's own tools are supported", where
            )
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise bad_request(f"{where} needs a name and an input_schema, an object", where)
        for key, value in shared.check_fields(tool, _TOOL_RULES).items():
            raise bad_request(f"'{where}.{key}' = {value!r} cannot be honoured", f"{where}.{key}")
    return None if tools is None else tools_to_chat(tools)


def _tool_choice(choice: Mapping[str, Any]) -> tuple[Any, RequestField | None]:
    """Convert Anthropic's `tool_choice` to the argument `tool_choice` of `read_tools`.

    Returns:
        Two items: the value of `tool_choice` as in chat completions, and the field that limits the
        answer to one call (None if several calls are allowed).
    """
    kind, field = choice.get("type"), "tool_choice.disable_parallel_tool_use"
    one_call = (field, True) if choice.get("disable_parallel_tool_use") is True else None
    if kind == "tool":
        return choice, one_call
    if kind not in ("auto", "any", "none") and (kind is not None or choice):
        raise bad_request(
            f"'tool_choice' has the type {kind!r}: there are auto, any, tool and none",
            "tool_choice",
        )
    return kind, one_call


def _format(body: Mapping[str, Any]) -> RequestField:
    """Return name and value of the field with the response format.

    The field is `output_format` if it is set (beta API), else `output_config.format`. The value is
    None if neither is set.
    """
    config, beta = (body.get("output_config") or {}).get("format"), body.get("output_format")
    if config is not None and beta is not None:
        raise bad_request(
            "'output_format' and 'output_config.format' both set a format; use one of them",
            "output_format",
        )
    return ("output_format", beta) if beta is not None else ("output_config.format", config)
