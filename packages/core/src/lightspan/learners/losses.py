"""Losses per token, as pure functions of tensors. All tensors have the shape [tokens].

A learner minimises Σ weight · loss over tokens; the weights (`Row.weights`) hold all normalisation,
so nothing here takes a mean.

Notation: π is being trained; π_old is what the ratio and its clipping refer to; π_behaviour sampled
the token (the engine). Two forms, never mixed, or the engine/learner difference counts twice
(decoupled PPO, arXiv 2110.00641; verl's rollout correction, "bypass mode"):

- *bypass*: π_old := π_behaviour, the recorded log-probabilities. The clipped ratio is itself the
  importance weight, and `importance_weight` is not used.
- *decoupled*: π_old is the learner's own score from before the update;
  loss = w · L(π/π_old) with w = min(π_old/π_behaviour, C) (truncated importance sampling).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from lightspan.learners.protocol import KLEstimator

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are clamped to ± this, as in verl, so that exp stays finite."""


class ClippedLoss(NamedTuple):
    """Each of shape [tokens]."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """True where clipping took the gradient away."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(π_a/π_b), clamped."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_ratio_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> ClippedLoss:
    """PPO's clipped loss with separate bounds and a dual clip.

    With r = π/π_old: L = max(-A·r, -A·clip(r, 1 - low, 1 + high)) (arXiv 1707.06347; high > low is
    DAPO's clip-higher, 2503.14476). Where A < 0, L is at most -c·A (dual clip, 1912.09729), which
    bounds how hard a token that has become likely is pushed down.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return ClippedLoss(loss, ratio, clipped)


def importance_weight(old_logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """w = min(π_old/π_behaviour, C), without gradient (TIS, arXiv 2110.00641 with verl's cap)."""
    return log_ratio(old_logprobs, behaviour_logprobs).exp().clamp(max=cap).detach()


def kl_divergence(logprobs: Tensor, base_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimates KL(π‖π_base) from tokens of π (J. Schulman, "Approximating KL divergence", 2020).

    With x = log π - log π_base:

    - k1 = x: unbiased, signed. As a loss its expected gradient is zero: for reporting.
    - k2 = x²/2: biased value; as a loss its expected gradient is the KL's.
    - k3 = exp(-x) - 1 + x: unbiased, never negative.
    """
    x = log_ratio(logprobs, base_logprobs)
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(-x) + x


def entropy(log_distribution: Tensor) -> Tensor:
    """Entropy of each distribution.

    Args:
        log_distribution: [tokens, vocabulary], normalised.
    """
    # where the probability is 0 its logarithm is -inf, and 0 · -inf would be NaN
    return -(log_distribution.exp() * log_distribution.clamp(min=torch.finfo().min)).sum(-1)


def negative_log_likelihood(logprobs: Tensor) -> Tensor:
    """The loss of supervised fine-tuning."""
    return -logprobs
