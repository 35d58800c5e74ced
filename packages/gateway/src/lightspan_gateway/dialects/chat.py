"""OpenAI's chat completions API, `/v1/chat/completions`. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from lightspan.schema.records import Mode
from lightspan.schema.token_records import Sampling
from lightspan_gateway.api_errors import bad_request
from lightspan_gateway.dialects import base as shared
from lightspan_gateway.dialects.base import Answer, Choice, MessagesRequest
from lightspan_gateway.dialects.constraints import read_tools

RULES: Final = shared.FieldRules(
    types={
        **shared.SHARED_TYPES,
        "max_completion_tokens": (int,),
        "logprobs": (bool,),
        "tools": (list,),
    },
    supported=shared.SUPPORTED_BY_ALL
    | {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        *("n", "max_tokens", "max_completion_tokens", "logprobs", "return_token_ids"),
        "response_format",
    },
    defaults={
        **shared.DEFAULTS_OF_ALL,
        "logit_bias": ({}, None),
        "top_logprobs": (0, None),
        "modalities": (["text"], None),
        "functions": (None, []),
    },
    max_tokens=("max_completion_tokens", "max_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(MessagesRequest):
    """A request for a chat completion."""

    prompt_field: ClassVar[str] = "messages"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    # --- answers --------------------------------------------------------------------------
    def body(self, answer: Answer) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                "logprobs": _logprobs(choice) if self.logprobs else None,
                **self._ids(choice),
            }
            for choice in answer.choices
        ]
        return {
            **shared.head(answer.response_id, answer.created, answer.model, "chat.completion"),
            "choices": choices,
            "usage": answer.usage(),
            **self._prompt_ids(answer),
        }

    def _ids(self, choice: Choice) -> dict[str, Any]:
        return {"token_ids": list(choice.token_ids)} if self.token_ids else {}

    def _prompt_ids(self, answer: Answer) -> dict[str, Any]:
        return {"prompt_token_ids": list(answer.prompts[0])} if self.token_ids else {}

    # --- streams --------------------------------------------------------------------------
    def opening(
        self, base: Mapping[str, Any], index: int, prompt: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        yield _delta(base, index, {"role": "assistant", "content": ""})

    def delta(self, base: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
        return _delta(base, index, {"content": text})

    def last(self, answer: Answer, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for choice in answer.choices:
            for number, call in enumerate(choice.message.get("tool_calls") or ()):
                yield _delta(base, choice.index, {"tool_calls": [{"index": number, **call}]})
            end = {
                "index": choice.index,
                "delta": {},
                "finish_reason": choice.finish_reason,
                **({"logprobs": _logprobs(choice)} if self.logprobs else {}),
                **self._ids(choice),
            }
            yield {**base, **self._prompt_ids(answer), "choices": [end]}
        if self.include_usage:
            yield {**base, "choices": [], "usage": answer.usage()}


def _logprobs(choice: Choice) -> dict[str, Any]:
    return {"content": shared.token_logprobs(choice), "refusal": None}


def _delta(base: Mapping[str, Any], index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chunk of the stream with `delta`, the next part of the choice `index`."""
    return {**base, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}


def parse_chat(body: Mapping[str, Any], *, mode: Mode, forced: Sampling | None) -> ChatRequest:
    """Parse the body of a chat completions request.

    Unsupported fields that constrain the answer (`CONSTRAINING`) are always refused, and those that
    say nothing of the sampling are always ignored (`is_refused`). In training with `forced`, all
    other unsupported fields are ignored too. In validation, or if `forced` is None, they are
    refused. The call's span records the ignored fields.

    Args:
        body: the decoded JSON.
        mode: mode of the rollout.
        forced: sampling parameters that the algorithm sets for a trained policy; None to use those
            of the request. In validation only the temperature of `forced` applies.

    Raises:
        ApiError: 400 naming the field that is missing, invalid or unsupported.
    """
    messages, tools = body.get("messages"), body.get("tools") or None
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a non-empty array", "messages")
    return ChatRequest(
        **shared.read_fields(body, RULES, mode, forced),
        **read_tools(body, tools, ("response_format", _flat_format(body.get("response_format")))),
        messages=messages,
        logprobs=bool(body.get("logprobs")),
    )


def _flat_format(value: Any) -> Any:
    """Convert the value of `response_format` to the form of the Responses API.

    The fields in `json_schema` are moved one level up. A value without `json_schema` is returned
    unchanged.
    """
    inner = value.get("json_schema") if isinstance(value, Mapping) else None
    return {**inner, **value} if isinstance(inner, Mapping) else value
