"""Sampling of the next tokens, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightspan.schema.token_records import Sampling

GREEDY_TEMPERATURE: Final = 1e-6
"""Temperature used instead of 0: so low that the largest logit gets all probability."""


def sample(
    logits: Tensor, settings: Sequence[Sampling], generator: torch.Generator | None
) -> tuple[list[int], list[float]]:
    """Sample one token of each row.

    Args:
        logits: [rows, vocabulary] float32; changed in place. Masked tokens are -inf.
        settings: temperature, top-p and top-k for each row.
        generator: random generator; None for torch's global one.

    Returns:
        Tokens, and the log of the probability with which each was sampled.

    Raises:
        RuntimeError: logits are not finite.
    """
    temperatures = [max(float(each.temperature), GREEDY_TEMPERATURE) for each in settings]
    logits /= torch.tensor(temperatures, device=logits.device)[:, None]
    for row, each in zip(logits, settings, strict=True):  # few requests limit their tokens
        if 0 < each.top_k < len(row):
            row[row < row.topk(each.top_k).values[-1]] = -torch.inf
        if each.top_p < 1:
            probabilities, tokens = row.softmax(-1).sort(descending=True)
            before = probabilities.cumsum(-1) - probabilities
            row[tokens[before >= each.top_p]] = -torch.inf
    logprobs = logits.log_softmax(-1)
    # in float64, so that rounding makes no token likelier; a token of probability 0 is never hit
    mass = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:]
    if not torch.isfinite(total).all():
        raise RuntimeError("the model's logits are not finite")
    draws = torch.rand(total.shape, generator=generator, device=total.device, dtype=total.dtype)
    draws = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    sampled = torch.searchsorted(mass, draws, right=True)
    return sampled[:, 0].tolist(), logprobs.gather(1, sampled)[:, 0].tolist()
