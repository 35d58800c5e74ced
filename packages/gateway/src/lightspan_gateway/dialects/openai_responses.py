"""OpenAI's Responses API, `/v1/responses`. Pure.

Items are converted to chat messages (`schema.response_items`), so that a conversation has the same
tokens in both dialects. `previous_response_id` continues a response of the same attempt; as with
OpenAI, its instructions are not inherited.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

from lightspan.protocols.engine import ChatTokenizer
from lightspan.schema import genai_messages as genai, semconv as c
from lightspan.schema.openai_responses import (
    ItemError,
    instructions_of,
    items_to_messages,
    refused,
    tools_to_chat,
)
from lightspan.schema.records import Mode
from lightspan.schema.spans import Span
from lightspan.schema.token_records import CallOutcome, Sampling
from lightspan_gateway.api_errors import bad_request
from lightspan_gateway.dialects.base import (
    HONOURED_BY_ALL,
    NEUTRAL_IN_ALL,
    SHARED_TYPES,
    Answer,
    Choice,
    Conversation,
    Message,
    ModelRequest,
    Types,
    asked_sampling,
    check_types,
    decide_sampling,
    plain_message,
    rendered,
    template_options,
    token_logprobs,
    unsupported,
)
from lightspan_gateway.dialects.constraints import constraint_of, one_call_of
from lightspan_gateway.dialects.sse import Events, TypedEvents

ID_PREFIX: Final = "resp_"

HONOURED: Final = HONOURED_BY_ALL | {
    *("input", "instructions", "previous_response_id", "include", "text", "reasoning"),
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    "max_output_tokens",
}
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **NEUTRAL_IN_ALL,
    "background": (False, None),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "prompt": (None,),
    "prompt_cache_retention": (None, "in_memory", "in-memory", "24h"),
    "top_logprobs": (0, None),
    "truncation": ("disabled", None),
}
"""Unsupported fields, with the values that mean the default."""
_NEUTRAL_INSIDE: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "text": {"verbosity": ("medium", None)},
    "reasoning": {},
    "stream_options": {"include_obfuscation": (False, True, None)},
}
"""The same for nested fields; in `reasoning`, None and "none" mean the default."""
_LOGPROBS: Final = "message.output_text.logprobs"
_REPEATED: Final = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "text"),
    *("tool_choice", "tools"),
)
"""Fields that an answer repeats."""
_REFUSED: Final = ("background", "conversation", "prompt")
"""Fields that change what is asked: refused in training too."""
_INCLUDED: Final = (_LOGPROBS, "reasoning.encrypted_content")
"""Supported values of `include`; there is no reasoning to encrypt."""

_TYPES: Final[Types] = {
    **SHARED_TYPES,
    "max_output_tokens": (int,),
    "instructions": (str,),
    "previous_response_id": (str,),
    "tools": (list,),
    "include": (list,),
    "text": (dict,),
    "reasoning": (dict,),
    "chat_template_kwargs": (dict,),
    "metadata": (dict,),
}


class NumberedEvents(TypedEvents):
    """A stream of numbered events."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def one(self, chunk: Mapping[str, Any]) -> bytes:
        return super().one({**chunk, "sequence_number": next(self._numbers)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(ModelRequest):
    """A request for a response: one choice."""

    asks_with: ClassVar[str] = "input"
    chunk_object: ClassVar[str] = "response"
    id_prefix: ClassVar[str] = ID_PREFIX
    framing: ClassVar[type[Events]] = NumberedEvents

    asked: Mapping[str, Any]
    """The fields of the body that an answer repeats."""
    given: list[Message]
    """The input, as messages."""
    instructions: list[Message] = field(default_factory=list)
    before: Conversation = field(default_factory=list)
    """The conversation up to the previous response."""
    tools: list[dict[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        return [*self.instructions, *self.before, *self.given]

    def after(self, before: Conversation) -> ResponseRequest:
        """Return the request with the conversation before it."""
        return replace(self, before=[*before])

    def conversation(self, answer: Answer) -> Conversation:
        """Return the conversation that a next request continues."""
        return [*self.before, *self.given, answer.choices[0].message]

    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        plain = [plain_message(message, "input") for message in self.messages]
        if not plain:
            raise bad_request("'input' is empty: there is nothing to answer", "input")
        options, named = self.template_options, self.asks_with
        return [rendered(tokenizer, plain, self.tools, options, asked_with=named)]

    def attributes(self) -> dict[str, Any]:
        known: dict[str, Any] = {}
        if self.before:
            known[c.INPUT_MESSAGES] = genai.dump(self.messages)
        if self.instructions:
            known[c.INSTRUCTIONS] = True
        return known

    def without_prompt(self) -> Self:
        """Keep the messages, which a next request may continue."""
        return replace(self, tools=None, template_options={})

    # --- answers --------------------------------------------------------------------------
    def body(self, answer: Answer) -> dict[str, Any]:
        base = {"id": answer.response_id, "created": answer.created, "model": answer.model}
        choice = answer.choices[0]
        is_cut = choice.finish_reason == "length"
        return {
            **self._response(base, "incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [item for item, _ in self._output(answer)],
            "usage": _usage(answer),
        }

    def _response(self, base: Mapping[str, Any], status: str) -> dict[str, Any]:
        return {
            "id": base["id"],
            "object": "response",
            "created_at": base["created"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self.asked.get("instructions"),
            "max_output_tokens": self.asked.get("max_output_tokens"),
            "metadata": self.asked.get("metadata") or {},
            "model": base["model"],
            "output": [],
            "parallel_tool_calls": self.asked.get("parallel_tool_calls") is not False,
            "previous_response_id": self.previous,
            "temperature": self.sampling.temperature,
            "text": {"format": (self.asked.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": self.asked.get("tool_choice") or "auto",
            "tools": self.asked.get("tools") or [],
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _output(self, answer: Answer) -> list[tuple[dict[str, Any], int]]:
        """Return each item with its index."""
        choice = answer.choices[0]
        calls = choice.message.get("tool_calls") or ()
        text = choice.message.get("content")
        items = [_call_item(call) for call in calls]
        if text or not calls:
            items.insert(0, self._text_item(answer.response_id, choice, text or ""))
        return [(item, index) for index, item in enumerate(items)]

    def _text_item(self, response_id: str, choice: Choice, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if self.logprobs:
            part["logprobs"] = token_logprobs(choice)
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        return {
            "id": _message_id(response_id),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }

    # --- streams --------------------------------------------------------------------------
    def opening(
        self, base: Mapping[str, Any], index: int, prompt: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        response = self._response(base, "in_progress")
        yield {"type": "response.created", "response": response}
        yield {"type": "response.in_progress", "response": response}

    def begin_text(self, base: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
        item_id = _message_id(base["id"])
        item = {
            "id": item_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        part = {"type": "output_text", "text": "", "annotations": []}
        where = {"item_id": item_id, "output_index": 0, "content_index": 0}
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
        yield {"type": "response.content_part.added", **where, "part": part}

    def delta(self, base: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
        return {
            "type": "response.output_text.delta",
            "item_id": _message_id(base["id"]),
            "output_index": 0,
            "content_index": 0,
            "delta": text,
            "logprobs": [],
        }

    def last(self, answer: Answer, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for item, index in self._output(answer):
            if item["type"] == "message":
                yield from self._end_of_text(item, index, base)
            else:
                yield from _call_events(item, index)
        body = self.body(answer)
        yield {"type": f"response.{body['status']}", "response": body}

    def _end_of_text(
        self, item: Mapping[str, Any], index: int, base: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        part = item["content"][0]
        if not part["text"]:  # no text was streamed, so no part has begun
            yield from self.begin_text(base, index)
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        logprobs = part.get("logprobs", [])
        text = {"text": part["text"], "logprobs": logprobs}
        yield {"type": "response.output_text.done", **where, **text}
        yield {"type": "response.content_part.done", **where, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    where = {"item_id": item["id"], "output_index": index}
    empty = {**item, "arguments": "", "status": "in_progress"}
    arguments = item["arguments"]
    kind = "response.function_call_arguments"
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    yield {"type": f"{kind}.delta", **where, "delta": arguments}
    yield {"type": f"{kind}.done", **where, "name": item["name"], "arguments": arguments}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": "fc_" + _digest(call["id"]),
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }


def _usage(answer: Answer) -> dict[str, Any]:
    used = answer.usage()
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used["total_tokens"],
    }


def _message_id(response_id: str) -> str:
    """Return an id that every replay has."""
    return "msg_" + _digest(response_id)


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


# --- requests -------------------------------------------------------------------------------
def parse_response(
    body: Mapping[str, Any], *, mode: Mode, forced: Sampling | None
) -> ResponseRequest:
    """Parse a request; see `lightspan_gateway.dialects.chat.parse_chat`.

    Raises:
        ApiError: 400 naming the field.
    """
    check_types(body, _TYPES)
    given = _given(body)
    tools = _tools(body)
    limited = {**body, "max_tokens": body.get("max_output_tokens"), "max_completion_tokens": None}
    sampling, overrides = decide_sampling(
        body, asked_sampling(limited), _impossible(body), mode, forced
    )
    if "max_tokens" in overrides:
        overrides["max_output_tokens"] = overrides.pop("max_tokens")
    return ResponseRequest(
        model=str(body.get("model") or ""),
        sampling=sampling,
        logprobs=_LOGPROBS in (body.get("include") or ()),
        constraint=constraint_of(
            format=("text.format", (body.get("text") or {}).get("format")),
            tools=tools,
            choice=body.get("tool_choice"),
            one_call=one_call_of(body),
        ),
        parse_tools=tools is not None and body.get("tool_choice") != "none",
        asked={key: body[key] for key in _REPEATED if key in body},
        given=given,
        instructions=instructions_of(body),
        previous=body.get("previous_response_id"),
        tools=tools,
        template_options=template_options(body),
        overrides=overrides,
    )


def _given(body: Mapping[str, Any]) -> list[Message]:
    for key in _REFUSED:
        if body.get(key):
            raise bad_request(f"'{key}' cannot be honoured by this endpoint; leave it out", key)
    items = body.get("input")
    if not isinstance(items, str | list) or not items:
        raise bad_request("'input' must be a non-empty text or array of items", "input")
    try:
        return items_to_messages(items, refused)
    except ItemError as error:
        code = c.UNSUPPORTED_CONTENT if error.is_media else None
        raise bad_request(str(error), error.where, code) from error


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools") or None
    for number, tool in enumerate(tools or ()):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if kind != "function" or not isinstance(tool.get("name"), str):
            where = f"tools[{number}]"
            raise bad_request(
                f"{where} is of type {kind!r}: only functions with a name can be called here",
                where,
            )
    return None if tools is None else tools_to_chat(tools)


def _impossible(body: Mapping[str, Any]) -> dict[str, Any]:
    found = unsupported(body, HONOURED, NEUTRAL)
    for key, neutral in _NEUTRAL_INSIDE.items():
        for name, value in (body.get(key) or {}).items():
            if f"{key}.{name}" == "text.format":
                continue
            if not any(value == nothing for nothing in neutral.get(name, (None, "none"))):
                found[f"{key}.{name}"] = value
    others = [name for name in body.get("include") or () if name not in _INCLUDED]
    if others:
        found["include"] = others
    return found


def recorded_conversation(span: Span) -> Conversation:
    """Return the conversation up to a response that another gateway process answered.

    Raises:
        ApiError: 400, it was not answered.
    """
    known = span.attributes
    answers: Sequence[Message] = genai.load(str(known.get(c.OUTPUT_MESSAGES, "[]")))
    outcome = known.get(c.CALL_OUTCOME)
    if not answers or outcome in (CallOutcome.ERROR, CallOutcome.CANCELLED):
        raise bad_request(
            "the response that 'previous_response_id' names was not answered",
            "previous_response_id",
            "previous_response_not_found",
        )
    if known.get(c.KEYS_REPLACED):
        raise bad_request(
            "what was said up to the response that 'previous_response_id' names held a key, and is "
            "not kept: send the whole conversation as 'input'",
            "previous_response_id",
            "previous_response_not_found",
        )
    said = genai.load(str(known.get(c.INPUT_MESSAGES, "[]")))
    answer = {key: value for key, value in answers[0].items() if key != "finish_reason"}
    return [*said[1 if known.get(c.INSTRUCTIONS) else 0 :], answer]


__all__ = [
    "HONOURED",
    "ID_PREFIX",
    "NEUTRAL",
    "Conversation",
    "ResponseRequest",
    "parse_response",
    "recorded_conversation",
]
