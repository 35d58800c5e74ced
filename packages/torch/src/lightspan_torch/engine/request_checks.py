"""Checks of generation requests, shared by engines. Imports no torch."""

from __future__ import annotations

import sys

from lightspan.errors import ContextOverflowError, EngineError, UnsupportedError
from lightspan.protocols.engine import GenerationRequest, PromptRefused
from lightspan.schema.token_records import Sampling


def check_request(
    request: GenerationRequest,
    *,
    context: int,
    vocabulary: int,
    options: str,
    no_images: str = "this engine takes none",
    temperatures: tuple[float, float] = (0.0, sys.float_info.max),
) -> int:
    """Check a generation request, and return the maximum number of tokens of its answer.

    Args:
        request: the request to check.
        context: the policy's context length, in tokens.
        vocabulary: number of ids of the policy's vocabulary.
        options: names of the engine's options that limit the context, for the error message.
        no_images: why the policy takes no images; "" if it takes some.
        temperatures: minimum and maximum temperature. Temperature 0 is allowed in any case.

    Raises:
        ContextOverflowError: the prompt and one token of answer exceed the context.
        PromptRefused: a prompt id is not in the vocabulary.
        UnsupportedError: a sampling parameter is out of range, or there are images and the policy
            takes none.
        EngineError: the prompt is empty.
    """
    prompt = request.prompt_ids
    if request.images and no_images:
        raise UnsupportedError(
            f"request {request.request_id} has images, and policy {request.policy} takes none: "
            f"{no_images}"
        )
    if not prompt:
        raise EngineError(f"request {request.request_id} has an empty prompt")
    if len(prompt) + 1 > context:
        raise ContextOverflowError(
            f"the prompt has {len(prompt)} tokens; the context of policy {request.policy} holds "
            f"{context}, including one for the answer (the model's context, or less by {options})"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise PromptRefused(
            f"prompt ids must be from 0 to {vocabulary - 1}; got {min(prompt)} to {max(prompt)}"
        )
    _check_sampling(request.sampling, temperatures)
    room = context - len(prompt)
    return min(request.sampling.max_tokens or room, room)


def _check_sampling(sampling: Sampling, temperatures: tuple[float, float]) -> None:
    low, high = temperatures
    checks = {
        "temperature": sampling.temperature == 0 or low <= sampling.temperature <= high,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "max_tokens": sampling.max_tokens is None or sampling.max_tokens >= 1,
    }
    for name, is_valid in checks.items():
        if not is_valid:
            limits = f" (the engine's temperature is 0, or {low:g} to {high:g})" if low else ""
            raise UnsupportedError(
                f"{name}={getattr(sampling, name)} cannot be sampled with{limits}"
            )


def copy_of(error: EngineError) -> EngineError:
    """Return a copy of an error.

    If several callers raised the same error object, it would collect the tracebacks of all of them.
    """
    return type(error)(str(error))
