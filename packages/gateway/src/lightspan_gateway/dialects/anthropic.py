"""Anthropic's Messages API, `/v1/messages`. Pure.

Blocks are converted to chat messages (`schema.message_blocks`), so that a conversation has the same
tokens in both dialects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

import msgspec

from lightspan.protocols.engine import ChatTokenizer
from lightspan.schema import semconv as c
from lightspan.schema.anthropic_messages import messages_of, tools_to_chat
from lightspan.schema.media import is_media
from lightspan.schema.records import Mode
from lightspan.schema.token_records import Sampling
from lightspan_gateway.api_errors import ApiError, bad_request
from lightspan_gateway.dialects.base import (
    SHARED_TYPES,
    Answer,
    Choice,
    Message,
    ModelRequest,
    Types,
    asked_sampling,
    check_types,
    decide_sampling,
    plain_message,
    rendered,
    template_options,
    unsupported,
)
from lightspan_gateway.dialects.constraints import Asked, constraint_of
from lightspan_gateway.dialects.sse import Events, TypedEvents, event_of

HONOURED: Final = frozenset(
    {
        *("model", "stream", "temperature", "top_p", "top_k", "max_tokens", "stop_sequences"),
        *("messages", "system", "tools", "tool_choice", "chat_template_kwargs"),
        *("output_config", "output_format", "thinking"),
        "cache_control",  # does not affect the answer
    }
)
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "context_management": (None, {}),
    "mcp_servers": (None, []),
    "speed": ("standard", None),
}
"""Unsupported fields, with the values that mean the default."""
_REFUSED: Final = ("compaction", "container", "mcp_servers", "thread")
"""Fields that change what is asked: refused in training too."""
_TOOL_FIELDS: Final = frozenset(
    {
        *("type", "name", "description", "input_schema", "strict"),
        *("cache_control", "eager_input_streaming"),  # do not affect the answer
    }
)
_NEUTRAL_TOOL: Final[Mapping[str, tuple[Any, ...]]] = {
    "allowed_callers": (["direct"], None),
    "defer_loading": (False, None),
    "input_examples": ([], None),
}

_TYPES: Final[Types] = {
    **SHARED_TYPES,
    "messages": (list,),
    "system": (str, list),
    "tools": (list,),
    "tool_choice": (dict,),
    "stop_sequences": (list,),
    "thinking": (dict,),
    "output_config": (dict,),
    "output_format": (dict,),
    "chat_template_kwargs": (dict,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(ModelRequest):
    """A request for a message: one choice."""

    asks_with: ClassVar[str] = "messages"
    chunk_object: ClassVar[str] = "message"
    id_prefix: ClassVar[str] = "msg_"
    framing: ClassVar[type[Events]] = TypedEvents

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        options, named = self.template_options, self.asks_with
        return [rendered(tokenizer, self.messages, self.tools, options, asked_with=named)]

    def without_prompt(self) -> Self:
        return replace(self, messages=[], tools=None, template_options={})

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
                written = next(calls)["function"]["arguments"]
                yield _start(number, {**block, "input": {}})
                yield _delta(number, {"type": "input_json_delta", "partial_json": written})
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
    """Return a message without content."""
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
    """Return the blocks of an answer; an empty answer has an empty text, which clients expect."""
    calls = [_tool_use(call) for call in choice.message.get("tool_calls") or ()]
    text = choice.message.get("content") or ""
    return [{"type": "text", "text": text}, *calls] if text or not calls else calls


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = msgspec.json.decode(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def _stop(choice: Choice) -> dict[str, str | None]:
    reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    reason, stop = reasons[choice.finish_reason], choice.stop
    if stop is None or reason == "tool_use":
        return {"stop_reason": reason, "stop_sequence": None}
    return {"stop_reason": "stop_sequence", "stop_sequence": stop}


def _usage(prompt: int, answer: int) -> dict[str, int]:
    nothing = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **nothing, "output_tokens": answer}


# --- refusals -------------------------------------------------------------------------------
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def message_refusal(error: ApiError, request_id: str | None) -> bytes:
    """Return an error in Anthropic's format; its SDK shows `details` as `error_code`."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    told: dict[str, Any] = {"type": _KINDS.get(error.status, kind), "message": error.message}
    if error.code is not None:
        told["details"] = {"error_code": error.code}
    return msgspec.json.encode({"type": "error", "error": told, "request_id": request_id})


def message_error_event(payload: bytes) -> bytes:
    """Return the event of an error; clients ignore events without a name."""
    return b"event: error\n" + event_of(payload)


# --- requests -------------------------------------------------------------------------------
def parse_message(
    body: Mapping[str, Any], *, mode: Mode, forced: Sampling | None
) -> MessageRequest:
    """Parse a request; see `lightspan_gateway.dialects.chat.parse_chat`.

    Raises:
        ApiError: 400 naming the field.
    """
    if body.get("max_tokens") is None:
        raise bad_request("'max_tokens' is missing: say how long an answer may be", "max_tokens")
    check_types(body, _TYPES)
    for key in _REFUSED:
        if body.get(key):
            raise bad_request(f"'{key}' cannot be honoured by this endpoint; leave it out", key)
    messages = _messages(body)
    tools = _tools(body)
    limited = {key: value for key, value in body.items() if key != "max_completion_tokens"}
    wanted = asked_sampling(limited, stop="stop_sequences")
    sampling, overrides = decide_sampling(body, wanted, _impossible(body), mode, forced)
    choice, one_call = _tool_choice(body.get("tool_choice") or {})
    return MessageRequest(
        model=body.get("model") or "",
        sampling=sampling,
        constraint=constraint_of(
            format=_format(body),
            tools=tools,
            choice=choice,
            one_call=one_call,
        ),
        parse_tools=tools is not None and choice != "none",
        messages=messages,
        tools=tools,
        template_options=template_options(body),
        overrides=overrides,
    )


def _messages(body: Mapping[str, Any]) -> list[Message]:
    given = body.get("messages")
    if not given:
        raise bad_request("'messages' must be a non-empty array", "messages")
    last = given[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        where = f"messages[{len(given) - 1}]"
        raise bad_request(
            f"{where} is the assistant's: an answer that goes on from a text given for it cannot "
            "be had here; end with a message of the user",
            where,
        )
    said = messages_of(body, _refused)
    return [plain_message(message, "messages") for message in said]


def _refused(block: Any, where: str) -> Message:
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    raise bad_request(
        f"{where} is of type {kind!r}: only text, tool calls and their results are understood",
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
                f"{where} is of type {kind!r}: only tools of the app's own can be called here",
                where,
            )
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise bad_request(f"{where} needs a name and an input_schema, an object", where)
        for key, value in unsupported(tool, _TOOL_FIELDS, _NEUTRAL_TOOL).items():
            raise bad_request(f"'{where}.{key}' = {value!r} cannot be honoured", f"{where}.{key}")
    return None if tools is None else tools_to_chat(tools)


def _tool_choice(choice: Mapping[str, Any]) -> tuple[Any, Asked | None]:
    """Return the choice as chat has it, and the field that asks for at most one call."""
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


def _format(body: Mapping[str, Any]) -> Asked:
    """Return the field that asks for a format; `output_format` was its name in the beta."""
    config, beta = (body.get("output_config") or {}).get("format"), body.get("output_format")
    if config is not None and beta is not None:
        raise bad_request(
            "'output_format' and 'output_config.format' both ask for a format; give one of them",
            "output_format",
        )
    return ("output_format", beta) if beta is not None else ("output_config.format", config)


def _impossible(body: Mapping[str, Any]) -> dict[str, Any]:
    found = unsupported(body, HONOURED, NEUTRAL)
    for key, value in (body.get("output_config") or {}).items():
        if key != "format" and value is not None:
            found[f"output_config.{key}"] = value
    thinking = body.get("thinking") or {}
    kind = thinking.get("type", "disabled")
    if kind == "adaptive":  # the model decides, and these models do not think
        found["thinking"] = thinking
    elif kind != "disabled":
        raise bad_request(
            f"'thinking' = {thinking!r} cannot be honoured by this engine; leave it out", "thinking"
        )
    return found


__all__ = [
    "HONOURED",
    "NEUTRAL",
    "MessageRequest",
    "message_error_event",
    "message_refusal",
    "parse_message",
]
