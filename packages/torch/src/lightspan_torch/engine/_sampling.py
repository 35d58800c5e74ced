"""Sampling of the next tokens, and their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightspan.schema.token_records import Sampling

GREEDY_TEMPERATURE: Final = 1e-6
"""Temperature used instead of 0: so low that the largest logit gets all probability."""
_LIMITED_ROWS: Final = 64
"""Maximum number of rows that are sorted at once, for top-p; it takes six times their memory."""


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
    _limit(logits, settings)
    logprobs = logits.log_softmax(-1)
    # in float64, so that rounding makes no token likelier; a token of probability 0 is never hit
    mass = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:]
    draws = torch.rand(total.shape, generator=generator, device=total.device, dtype=total.dtype)
    draws = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    # beyond the last token if the total is not finite
    sampled = torch.searchsorted(mass, draws, right=True).clamp(max=logits.shape[1] - 1)
    # read at once, because the CPU waits for the device
    results = torch.cat([total, sampled.double(), logprobs.gather(1, sampled).double()], dim=1)
    totals, tokens, values = results.T.tolist()
    if not all(map(math.isfinite, totals)):
        raise RuntimeError("the model's logits are not finite")
    return [int(token) for token in tokens], values


def _limit(logits: Tensor, settings: Sequence[Sampling]) -> None:
    """Set the logits of tokens that top-k and top-p leave out to -inf, in place."""
    width = logits.shape[1]
    top_k = [n for n, each in enumerate(settings) if 0 < each.top_k < width]
    for first in range(0, len(top_k), _LIMITED_ROWS):
        rows = top_k[first : first + _LIMITED_ROWS]
        at, counts = logits.new_tensor([rows, [settings[n].top_k for n in rows]], dtype=torch.int64)
        own = logits[at]
        largest = own.topk(max(settings[n].top_k for n in rows)).values
        limits = largest.gather(1, counts[:, None] - 1)
        logits[at] = own.masked_fill(own < limits, -torch.inf)
    top_p = [n for n, each in enumerate(settings) if each.top_p < 1]
    for first in range(0, len(top_p), _LIMITED_ROWS):
        rows = top_p[first : first + _LIMITED_ROWS]
        at = logits.new_tensor(rows, dtype=torch.int64)
        limits = logits.new_tensor([settings[n].top_p for n in rows])
        values, tokens = logits[at].sort(descending=True)
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        values.masked_fill_(before >= limits[:, None], -torch.inf)
        logits[at] = torch.empty_like(values).scatter(1, tokens, values)
