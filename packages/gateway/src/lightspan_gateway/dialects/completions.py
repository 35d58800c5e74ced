"""OpenAI's text completions, `/v1/completions`. Pure.

A prompt is tokenised as it is, without a template or a BOS token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from lightspan.errors import ContextOverflowError
from lightspan.protocols.engine import ChatTokenizer
from lightspan.schema.records import Mode
from lightspan.schema.token_records import Sampling
from lightspan_gateway.api_errors import bad_request
from lightspan_gateway.dialects.base import (
    HONOURED_BY_ALL,
    MAX_CHOICES,
    NEUTRAL_IN_ALL,
    SHARED_TYPES,
    Answer,
    Choice,
    ModelRequest,
    Types,
    asked_sampling,
    check_types,
    decide_sampling,
    head,
    shared_fields,
    too_long,
    unsupported,
)

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's, where a request does not say."""

HONOURED: Final = HONOURED_BY_ALL | {"prompt", "n", "max_tokens", "logprobs", "return_token_ids"}
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **NEUTRAL_IN_ALL,
    "add_special_tokens": (False, None),
    "best_of": (1, None),
    "echo": (False, None),
    "logit_bias": ({}, None),
    "suffix": ("", None),
}
"""Unsupported fields, with the values that mean the default."""

_TYPES: Final[Types] = {**SHARED_TYPES, "logprobs": (int,), "best_of": (int,)}
_MAX_ID: Final = 2**31 - 1

Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ModelRequest):
    """A request for text completions; as with OpenAI, the choices of a prompt are adjacent."""

    asks_with: ClassVar[str] = "prompt"
    chunk_object: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl-"

    given: list[Prompt]
    """The prompts: text, or token ids."""

    @property
    def count(self) -> int:
        return len(self.given)

    def prompts(self, tokenizer: ChatTokenizer) -> list[list[int]]:
        most = tokenizer.context_length
        try:
            ids = [
                tokenizer.encode(prompt, most=most) if isinstance(prompt, str) else list(prompt)
                for prompt in self.given
            ]
        except ContextOverflowError as error:
            raise too_long(error, self.asks_with) from error
        if not all(ids):
            raise bad_request("'prompt' is empty: there is nothing to complete", "prompt")
        return ids

    def without_prompt(self) -> Self:
        return replace(self, given=[])

    def body(self, answer: Answer) -> dict[str, Any]:
        choices = [
            {"text": choice.message["content"], **self._end(answer, choice)}
            for choice in answer.choices
        ]
        known = head(answer.response_id, answer.created, answer.model, "text_completion")
        return {**known, "choices": choices, "usage": answer.usage()}

    def delta(self, base: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
        choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
        return {**base, "choices": [choice]}

    def last(self, answer: Answer, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for choice in answer.choices:
            yield {**base, "choices": [{"text": "", **self._end(answer, choice)}]}
        if self.include_usage:
            yield {**base, "choices": [], "usage": answer.usage()}

    def _end(self, answer: Answer, choice: Choice) -> dict[str, Any]:
        """Return the fields of a finished choice beside its text."""
        end: dict[str, Any] = {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "logprobs": _logprobs(choice) if self.logprobs else None,
        }
        if self.token_ids:
            end["prompt_token_ids"] = list(answer.prompts[choice.index // self.n])
            end["token_ids"] = list(choice.token_ids)
        return end


def _logprobs(choice: Choice) -> dict[str, Any]:
    return {
        "tokens": list(choice.token_texts),
        "token_logprobs": list(choice.logprobs),
        "top_logprobs": None,
        "text_offset": list(choice.text_offsets),
    }


def parse_completion(
    body: Mapping[str, Any], *, mode: Mode, forced: Sampling | None
) -> CompletionRequest:
    """Parse a request; see `lightspan_gateway.dialects.chat.parse_chat`.

    `logprobs=0` gives the log-probabilities of the sampled tokens; more, those of other tokens
    too, cannot be honoured.

    Raises:
        ApiError: 400 naming the field.
    """
    given = _prompts(body.get("prompt"))
    check_types(body, _TYPES)
    fields = shared_fields(body)
    if len(given) * fields["n"] > MAX_CHOICES:
        raise bad_request(
            f"{len(given)} prompts with n = {fields['n']} are more than {MAX_CHOICES} choices",
            "prompt",
        )
    asked = asked_sampling({"max_tokens": DEFAULT_MAX_TOKENS, **_without_nulls(body)})
    sampling, overrides = decide_sampling(body, asked, _impossible(body), mode, forced)
    return CompletionRequest(
        **fields,
        given=given,
        sampling=sampling,
        logprobs=body.get("logprobs") is not None,
        overrides=overrides,
    )


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in body.items() if value is not None}
    known.pop("max_completion_tokens", None)  # a chat's
    return known


def _impossible(body: Mapping[str, Any]) -> dict[str, Any]:
    found = unsupported(body, HONOURED, NEUTRAL)
    if found.get("best_of") == (body.get("n") or 1):
        del found["best_of"]  # the best n of n are all of them
    if body.get("logprobs"):
        found["logprobs"] = body["logprobs"]
    return found


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(p, str) or _are_ids(p) for p in value):
        return value
    raise bad_request(
        "'prompt' must be a text, an array of token ids, or a non-empty array of either", "prompt"
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ID
