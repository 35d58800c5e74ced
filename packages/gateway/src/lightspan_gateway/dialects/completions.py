"""OpenAI's text completions API, `/v1/completions`. Nothing here does I/O.

A prompt is tokenised unchanged, without a template or a BOS token.
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
from lightspan_gateway.dialects import base as shared
from lightspan_gateway.dialects.base import Answer, Choice, ModelRequest

RULES: Final = shared.FieldRules(
    types={**shared.SHARED_TYPES, "logprobs": (int,), "best_of": (int,)},
    supported=shared.SUPPORTED_BY_ALL
    | {"prompt", "n", "max_tokens", "logprobs", "return_token_ids"},
    defaults={
        **shared.DEFAULTS_OF_ALL,
        "add_special_tokens": (False, None),
        "best_of": (1, None),
        "echo": (False, None),
        "logit_bias": ({}, None),
        "suffix": ("", None),
    },
    default_max_tokens=16,  # OpenAI's default
)
_MAX_ID: Final = 2**31 - 1

Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ModelRequest):
    """A request for completions of one or more prompts.

    As in OpenAI's API, the choices of one prompt are adjacent in the answer.
    """

    prompt_field: ClassVar[str] = "prompt"
    chunk_object: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl-"

    inputs: list[Prompt]
    """The prompts: text, or token ids."""

    @property
    def count(self) -> int:
        return len(self.inputs)

    def prompts(self, tokenizer: ChatTokenizer) -> list[shared.Prompt]:
        limit = tokenizer.context_length
        try:
            ids = [
                tokenizer.encode(prompt, most=limit) if isinstance(prompt, str) else list(prompt)
                for prompt in self.inputs
            ]
        except ContextOverflowError as error:
            raise shared.too_long(error, self.prompt_field) from error
        if not all(ids):
            raise bad_request("'prompt' is empty: there is nothing to complete", "prompt")
        return [shared.Prompt(each) for each in ids]

    def without_prompt(self) -> Self:
        return replace(self, inputs=[])

    def body(self, answer: Answer) -> dict[str, Any]:
        choices = [
            {"text": choice.message["content"], **self._end(answer, choice)}
            for choice in answer.choices
        ]
        base = shared.head(answer.response_id, answer.created, answer.model, "text_completion")
        return {**base, "choices": choices, "usage": answer.usage()}

    def delta(self, base: Mapping[str, Any], index: int, text: str) -> dict[str, Any]:
        choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
        return {**base, "choices": [choice]}

    def last(self, answer: Answer, base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for choice in answer.choices:
            yield {**base, "choices": [{"text": "", **self._end(answer, choice)}]}
        if self.include_usage:
            yield {**base, "choices": [], "usage": answer.usage()}

    def _end(self, answer: Answer, choice: Choice) -> dict[str, Any]:
        """Return the fields of a finished choice, without its text."""
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
        "tokens": [octets.decode(errors="replace") for octets in choice.token_bytes],
        "token_logprobs": list(choice.logprobs),
        "top_logprobs": None,
        "text_offset": list(choice.text_offsets),
    }


def parse_completion(
    body: Mapping[str, Any], *, mode: Mode, forced: Sampling | None
) -> CompletionRequest:
    """Parse the body of a completions request.

    See `lightspan_gateway.dialects.chat.parse_chat` for the arguments. `logprobs=0` requests the
    log-probabilities of the sampled tokens. A larger value is unsupported, because it also requests
    those of tokens that were not sampled.

    Raises:
        ApiError: 400 naming the field that is missing, invalid or unsupported.
    """
    inputs = _prompts(body.get("prompt"))

    def adjust(unsupported: dict[str, Any]) -> None:
        if unsupported.get("best_of") == (body.get("n") or 1):
            del unsupported["best_of"]  # the best n of n choices are all of them
        if body.get("logprobs"):
            unsupported["logprobs"] = body["logprobs"]

    fields = shared.read_fields(body, RULES, mode, forced, adjust)
    if len(inputs) * fields["n"] > shared.MAX_CHOICES:
        raise bad_request(
            f"{len(inputs)} prompts with n = {fields['n']} are more than {shared.MAX_CHOICES} "
            "choices",
            "prompt",
        )
    return CompletionRequest(**fields, inputs=inputs, logprobs=body.get("logprobs") is not None)


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
