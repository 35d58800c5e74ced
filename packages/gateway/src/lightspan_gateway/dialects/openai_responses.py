"""OpenAI's Responses API, `/v1/responses`. Nothing here does I/O.

Items are converted to chat messages (`schema.openai_responses`), so that a conversation has the
same tokens as in a chat completions request. `previous_response_id` continues a response of the
same attempt; as in OpenAI's API, the instructions of that response are not inherited.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

from lightspan.schema import genai_messages as genai, openai_responses as responses, semconv as c
from lightspan.schema.media import is_media
from lightspan.schema.records import Mode
from lightspan.schema.spans import Span
from lightspan.schema.token_records import CallOutcome, Sampling
from lightspan_gateway.api_errors import bad_request
from lightspan_gateway.dialects import base as shared
from lightspan_gateway.dialects.base import Answer, Choice, Conversation, Message, MessagesRequest
from lightspan_gateway.dialects.constraints import read_tools
from lightspan_gateway.dialects.image_parts import ImagePart
from lightspan_gateway.dialects.response_tools import ToolOffer, read_offer
from lightspan_gateway.dialects.sse import Events, TypedEvents
from lightspan_gateway.request_body import digest_of

ID_PREFIX: Final = "resp_"
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDABLE: Final = (_LOGPROBS, "reasoning.encrypted_content")
"""Supported values of `include`. The second has no effect, because answers have no reasoning."""
_ECHOED: Final = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "text"),
    *("tool_choice", "tools"),
)
"""Fields of the request that the response repeats."""

RULES: Final = shared.FieldRules(
    types={
        **shared.SHARED_TYPES,
        "max_output_tokens": (int,),
        **dict.fromkeys(("instructions", "previous_response_id"), (str,)),
        **dict.fromkeys(("tools", "include"), (list,)),
        **dict.fromkeys(("text", "reasoning", "metadata"), (dict,)),
    },
    supported=shared.SUPPORTED_BY_ALL
    | {
        *("input", "instructions", "previous_response_id", "include", "text", "reasoning"),
        *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        *("max_output_tokens", "text.format"),
    },
    defaults={
        **shared.DEFAULTS_OF_ALL,
        "background": (False, None),
        "prompt_cache_retention": (None, "in_memory", "in-memory", "24h"),
        "top_logprobs": (0, None),
        "truncation": ("disabled", None),
    },
    nested={
        "text": {"verbosity": ("medium", None)},
        "reasoning": {},
        "stream_options": {"include_obfuscation": (False, True, None)},
    },
    refused=("background", "conversation", "prompt"),
    max_tokens=("max_output_tokens",),
)


class NumberedEvents(TypedEvents):
    """Format of a stream whose events have a name and a sequence number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def one(self, chunk: Mapping[str, Any]) -> bytes:
        return super().one({**chunk, "sequence_number": next(self._numbers)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(MessagesRequest):
    """A request of the Responses API; its answer has one choice."""

    prompt_field: ClassVar[str] = "input"
    limit_field: ClassVar[str] = "max_output_tokens"
    chunk_object: ClassVar[str] = "response"
    id_prefix: ClassVar[str] = ID_PREFIX
    framing: ClassVar[type[Events]] = NumberedEvents

    echoed: Mapping[str, Any]
    """The fields of the request that the response repeats."""
    offer: ToolOffer = field(default_factory=lambda: ToolOffer(tools=None))
    """The offered tools, and their names in the request."""
    instructions: int = 0
    """Number of messages at the start that are instructions."""
    continues: bool = False
    """Whether `messages` contains the conversation up to the response `previous`."""

    def after(self, before: Conversation) -> ResponseRequest:
        start = self.instructions
        messages = [*self.messages[:start], *before, *self.messages[start:]]
        return replace(self, messages=messages, continues=True)

    def conversation(self, answer: Answer) -> Conversation:
        return [*self.messages[self.instructions :], answer.choices[0].message]

    def attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        if self.continues:
            attributes[c.INPUT_MESSAGES] = genai.dump(self.messages)
        if self.instructions:
            attributes[c.INSTRUCTIONS] = True
        return attributes

    def without_prompt(self) -> Self:
        """Return a copy without the tools and the options of the chat template, to free memory.

        The messages are kept, because a later request may continue this response.
        """
        return replace(self, tools=None, template_options={})

    # --- answers --------------------------------------------------------------------------
    def body(self, answer: Answer) -> dict[str, Any]:
        base = {"id": answer.response_id, "created": answer.created, "model": answer.model}
        choice = answer.choices[0]
        is_cut = choice.finish_reason == "length"
        return {
            **self._response(base, "incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output(answer),
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
            "instructions": self.echoed.get("instructions"),
            "max_output_tokens": self.echoed.get("max_output_tokens"),
            "metadata": self.echoed.get("metadata") or {},
            "model": base["model"],
            "output": [],
            "parallel_tool_calls": self.echoed.get("parallel_tool_calls") is not False,
            "previous_response_id": self.previous,
            "temperature": self.sampling.temperature,
            "text": {"format": (self.echoed.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": self.echoed.get("tool_choice") or "auto",
            "tools": self.echoed.get("tools") or [],
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _output(self, answer: Answer) -> list[dict[str, Any]]:
        choice = answer.choices[0]
        calls = choice.message.get("tool_calls") or ()
        text = choice.message.get("content")
        items = [self.offer.call_item(call, digest_of(call["id"].encode(), 12)) for call in calls]
        if text or not calls:
            items.insert(0, self._text_item(answer.response_id, choice, text or ""))
        return items

    def _text_item(self, response_id: str, choice: Choice, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if self.logprobs:
            part["logprobs"] = shared.token_logprobs(choice)
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        return _message_item(response_id, status, [part])

    # --- streams --------------------------------------------------------------------------
    def opening(
        self, base: Mapping[str, Any], index: int, prompt: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        response = self._response(base, "in_progress")
        yield {"type": "response.created", "response": response}
        yield {"type": "response.in_progress", "response": response}

    def begin_text(self, base: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
        item = _message_item(base["id"], "in_progress", [])
        part = {"type": "output_text", "text": "", "annotations": []}
        where = {"item_id": item["id"], "output_index": 0, "content_index": 0}
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
        for index, item in enumerate(self._output(answer)):
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
        text = {"text": part["text"], "logprobs": part.get("logprobs", [])}
        yield {"type": "response.output_text.done", **where, **text}
        yield {"type": "response.content_part.done", **where, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _message_item(response_id: str, status: str, content: list[Any]) -> dict[str, Any]:
    return {
        "id": _message_id(response_id),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _call_events(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    where = {"item_id": item["id"], "output_index": index}
    is_custom = item["type"] == "custom_tool_call"
    key, kind = "arguments", "function_call_arguments"
    if is_custom:
        key, kind = "input", "custom_tool_call_input"
    empty = {**item, key: "", "status": "in_progress"}
    whole = {key: item[key], **({} if is_custom else {"name": item["name"]})}
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    yield {"type": f"response.{kind}.delta", **where, "delta": item[key]}
    yield {"type": f"response.{kind}.done", **where, **whole}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _message_id(response_id: str) -> str:
    """Return the id of a response's message item, which is the same in every replay."""
    return "msg_" + digest_of(response_id.encode(), 12)


# --- requests -------------------------------------------------------------------------------
def parse_response(
    body: Mapping[str, Any], *, mode: Mode, forced: Sampling | None
) -> ResponseRequest:
    """Parse the body of a Responses request.

    See `lightspan_gateway.dialects.chat.parse_chat` for the arguments.

    Raises:
        ApiError: 400 naming the field that is missing, invalid or unsupported.
    """

    def adjust(unsupported: dict[str, Any]) -> None:
        others = [name for name in body.get("include") or () if name not in _INCLUDABLE]
        if others:
            unsupported["include"] = others

    fields = shared.read_fields(body, RULES, mode, forced, adjust)
    omitted: list[Any] = []
    messages, offer = _messages(body, omitted), read_offer(body.get("tools"))
    instructions = responses.instructions_of(body)
    fields["overrides"] |= offer.overrides
    if omitted:
        fields["overrides"]["input.reasoning"] = (len(omitted), None)
    return ResponseRequest(
        **fields,
        **read_tools(body, offer.tools, ("text.format", (body.get("text") or {}).get("format"))),
        offer=offer,
        messages=[*instructions, *messages],
        instructions=len(instructions),
        logprobs=_LOGPROBS in (body.get("include") or ()),
        echoed={key: body[key] for key in _ECHOED if key in body},
        previous=body.get("previous_response_id"),
    )


def _messages(body: Mapping[str, Any], omitted: list[Any]) -> list[Message]:
    """Convert the input of a request to chat messages.

    Args:
        body: the request.
        omitted: list to which items of reasoning are added. They have no message: their content is
            encrypted for the model that wrote them, or is only a summary.
    """

    def other(item: Any, where: str) -> Message:
        if isinstance(item, ImagePart):
            return {}
        kind = item.get("type") if isinstance(item, Mapping) else type(item).__name__
        if kind == "reasoning":
            omitted.append(item)
            return {}
        raise bad_request(
            f"{where} is of type {kind!r}: only messages with text, calls of tools and their "
            f"outputs are understood{shared.images_advice(kind, 'input_image')}",
            where,
            c.UNSUPPORTED_CONTENT if is_media(item) else None,
        )

    items = body.get("input")
    if not isinstance(items, str | list) or not items:
        raise bad_request("'input' must be a non-empty text or array of items", "input")
    return responses.items_to_messages(items, other)


def recorded_conversation(span: Span) -> Conversation:
    """Return the messages of a conversation, up to and including the response recorded in `span`.

    It is used for a response that another process gave, for example before a restart. The
    instructions of the recorded request are left out.

    Args:
        span: the recorded call that produced the response.

    Raises:
        ApiError: 400 if the call failed or was cancelled. Also if the messages contained an API
            key, which is not stored, so that they are incomplete.
    """
    attributes = span.attributes
    answers: Sequence[Message] = genai.load(str(attributes.get(c.OUTPUT_MESSAGES, "[]")))
    reason = ""
    if not answers or attributes.get(c.CALL_OUTCOME) in (CallOutcome.ERROR, CallOutcome.CANCELLED):
        reason = "the response that 'previous_response_id' names was not answered"
    elif attributes.get(c.KEYS_REPLACED):
        reason = (
            "the conversation up to the response that 'previous_response_id' names held a key and "
            "was not stored: send the whole conversation as 'input'"
        )
    if reason:
        raise bad_request(reason, "previous_response_id", "previous_response_not_found")
    messages = genai.load(str(attributes.get(c.INPUT_MESSAGES, "[]")))
    answer = {key: value for key, value in answers[0].items() if key != "finish_reason"}
    return [*messages[1 if attributes.get(c.INSTRUCTIONS) else 0 :], answer]
