"""OpenAI's chat completions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

from lightspan.protocols.engine import ChatTokenizer
from lightspan.schema.records import Mode
from lightspan.schema.token_records import Sampling
from lightspan_gateway.api_errors import bad_request
from lightspan_gateway.dialects.base import (
    HONOURED_BY_ALL,
    NEUTRAL_IN_ALL,
    SHARED_TYPES,
    Answer,
    Choice,
    Message,
    ModelRequest,
    Types,
    asked_sampling,
    check_types,
    decide_sampling,
    head,
    plain_message,
    rendered,
    shared_fields,
    template_options,
    token_logprobs,
    unsupported,
)
from lightspan_gateway.dialects.constraints import constraint_of, one_call_of

HONOURED: Final = HONOURED_BY_ALL | {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("n", "max_tokens", "max_completion_tokens", "logprobs", "return_token_ids"),
    "response_format",
}
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **NEUTRAL_IN_ALL,
    "logit_bias": ({}, None),
    "top_logprobs": (0, None),
    "guided_json": (None,),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "functions": (None, []),
    "function_call": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
}
"""Unsupported fields, with the values that mean the default."""

_TYPES: Final[Types] = {
    **SHARED_TYPES,
    "max_completion_tokens": (int,),
    "logprobs": (bool,),
    "tools": (list,),
    "chat_template_kwargs": (dict,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ModelRequest):
    """A chat request."""

    asks_with: ClassVar[str] = "messages"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

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
            **head(answer.response_id, answer.created, answer.model, "chat.completion"),
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
    return {"content": token_logprobs(choice), "refusal": None}


def _delta(base: Mapping[str, Any], index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chunk before the last."""
    return {**base, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}


def parse_chat(body: Mapping[str, Any], *, mode: Mode, forced: Sampling | None) -> ChatRequest:
    """Parse a request.

    Args:
        body: the decoded JSON.
        mode: of the rollout. In train and dev mode, for a trained policy (with `forced`), sampling
            is the algorithm's and unsupported fields are overridden; else they are refused, but
            for `STEERING`.
        forced: the algorithm's sampling; in val mode its temperature alone counts.

    Raises:
        ApiError: 400 naming the field.
    """
    messages = _messages(body)
    check_types(body, _TYPES)
    sampling, overrides = decide_sampling(
        body,
        asked_sampling(body),
        unsupported(body, HONOURED, NEUTRAL),
        mode,
        forced,
    )
    tools = body.get("tools") or None
    return ChatRequest(
        **shared_fields(body),
        messages=messages,
        sampling=sampling,
        tools=tools,
        constraint=constraint_of(
            format=("response_format", _flat_format(body.get("response_format"))),
            tools=tools,
            choice=body.get("tool_choice"),
            one_call=one_call_of(body),
        ),
        parse_tools=tools is not None and body.get("tool_choice") != "none",
        logprobs=bool(body.get("logprobs")),
        template_options=template_options(body),
        overrides=overrides,
    )


def as_in_training(
    body: Mapping[str, Any], forced: Sampling
) -> tuple[dict[str, Any], Mapping[str, tuple[Any, Any]]]:
    """Return the request with the sampling of training, for a dry run, and the overrides.

    Raises:
        ApiError: 400 naming the field.
    """
    chat = parse_chat(body, mode=Mode.TRAIN, forced=forced)
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    used = {
        "temperature": chat.sampling.temperature,
        "top_p": chat.sampling.top_p if chat.sampling.top_p < 1 else None,
        "top_k": chat.sampling.top_k or None,
        limit: chat.sampling.max_tokens,
    }
    kept = {key: value for key, value in body.items() if key not in chat.overrides}
    return kept | {key: value for key, value in used.items() if value is not None}, chat.overrides


def _flat_format(value: Any) -> Any:
    """Return a response format as the Responses API has it."""
    inner = value.get("json_schema") if isinstance(value, Mapping) else None
    return {**inner, **value} if isinstance(inner, Mapping) else value


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a non-empty array", "messages")
    return [plain_message(message, f"messages[{n}]") for n, message in enumerate(messages)]
