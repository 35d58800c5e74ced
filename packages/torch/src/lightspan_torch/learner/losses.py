"""Losses per token, as pure functions of tensors. All tensors have the shape [tokens].

A learner minimises Σ weight · loss over tokens; the weights (`Row.weights`) hold all normalisation,
so no loss takes a mean.

A *sequence* of a formula is a call: the tokens of one sampled answer. A row may have several calls;
its other tokens do not affect the loss. `calls` is the call number of each token.

| form | loss of a token | source |
|---|---|---|
| `clip` | max(-A·r, -A·clip(r, 1 - low, 1 + high)), dual clip | PPO, arXiv 1707.06347 |
| `gspo` | max(-A·s, -A·clip(s, 1 - low, 1 + high)) | GSPO, 2507.18071 |
| `cispo` | -sg[clip(r, 1 - low, 1 + high)] · A · log π | MiniMax-M1, 2506.13585 |

with r = π/π_old of the token, s = exp(mean of log r over the call's tokens), and sg[…] without
gradient.

Notation: π is being trained; π_old is the reference of the ratio and its clipping; π_behaviour
sampled the token (the engine). Two forms, never mixed, or the engine/learner difference counts
twice (decoupled PPO, arXiv 2110.00641; verl's rollout correction, "bypass mode"):

- *bypass*: π_old := π_behaviour, the recorded log-probabilities. The clipped ratio is itself the
  importance weight, and `importance_weight` is not used.
- *decoupled*: π_old is the learner's own score from before the update;
  loss = w · L(π/π_old) with w = min(π_old/π_behaviour, C) (truncated importance sampling), of the
  token, or of the call: w = min(Π π_old/π_behaviour, C) over its tokens. verl calls these
  `rollout_is: token` and `rollout_is: sequence`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from lightspan.protocols.learner import KLEstimator

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are clamped to ± this, as in verl, so that exp stays finite."""


class ClippedLoss(NamedTuple):
    """A loss with its ratio; each of shape [tokens]."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """True where clipping removed the gradient (CISPO: bounded it)."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return log(π_a/π_b), clamped to ±`LOG_RATIO_LIMIT`.

    Args:
        numerator: log π_a.
        denominator: log π_b.
    """
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
    """Compute PPO's clipped loss with separate bounds and a dual clip.

    With r = π/π_old: L = max(-A·r, -A·clip(r, 1 - low, 1 + high)) (arXiv 1707.06347; high > low is
    DAPO's clip-higher, 2503.14476). Where A < 0, L is at most -c·A (dual clip, 1912.09729), which
    bounds how hard a token that has become likely is pushed down.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    loss, clipped = _clipped(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        capped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return ClippedLoss(loss, ratio, clipped)


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return max(-A·ratio, -A·clip(ratio)), and True where the clipped term is larger."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, bounded), bounded > plain


def gspo_loss(
    logprobs: Tensor,
    call_ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> ClippedLoss:
    """Compute GSPO's loss (arXiv 2507.18071): PPO's loss of the ratio of the whole call.

    With s as in the module, L = max(-A·s, -A·clip(s, 1 - low, 1 + high)) for each of its T tokens.
    The gradient of s is s · mean(∇ log π). Advantages and weights of a call's tokens are equal, so
    the sum over its tokens is the same as if each token had its own gradient s·∇ log π, which needs
    no other token's gradient: s·π/sg[π], the paper's GSPO-token, as in verl. Where advantages or
    weights differ within a call (importance weights per token), that form is the definition.

    Args:
        call_ratios: s of each token's call, by `call_ratios`.
    """
    # π/sg[π] is 1, and its gradient is that of log π
    ratio = call_ratios * (logprobs - logprobs.detach()).exp()
    loss, clipped = _clipped(ratio, advantages, clip_low, clip_high)
    return ClippedLoss(loss, ratio, clipped)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> ClippedLoss:
    """Compute CISPO's loss (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): -sg[clip(r)] · A · log π.

    Clipping bounds a token's weight, where `clipped` is True, and removes no token's gradient. The
    loss is meant for its gradient: its value bounds no return.
    """
    ratio = log_ratio(logprobs.detach(), old_logprobs).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return ClippedLoss(-bounded * advantages * logprobs, ratio, bounded != ratio)


def call_ratios(logprobs: Tensor, old_logprobs: Tensor, calls: Tensor) -> Tensor:
    """Return s = exp(mean over the call's tokens of log π/π_old) at each token, without gradient.

    Args:
        logprobs, old_logprobs: log π and log π_old, of all tokens of the calls.
        calls: call number of each token, from 0.
    """
    sums = _sums(logprobs - old_logprobs, calls)
    counts = _sums(torch.ones_like(logprobs), calls)
    return (sums / counts).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().to(logprobs.dtype)


def _sums(values: Tensor, calls: Tensor) -> Tensor:
    """Return for each token the sum of `values` over the token's call, in float64.

    In float32, the rounding error of a long call's sum would be as large as GSPO's clip bounds.
    """
    size = int(calls.max()) + 1 if len(calls) else 0
    totals = torch.zeros(size, dtype=torch.float64, device=values.device)
    return totals.index_add(0, calls, values.detach().double())[calls]


def importance_weight(old_logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """Return w = min(π_old/π_behaviour, C) without gradient (TIS, arXiv 2110.00641, verl's cap)."""
    return log_ratio(old_logprobs, behaviour_logprobs).exp().clamp(max=cap).detach()


def call_importance_weight(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, calls: Tensor, cap: float
) -> Tensor:
    """Return w = min(Π π_old/π_behaviour, C) over the call at each of its tokens, without gradient.

    The weight of a call is unbiased except for the cap, whereas the weight of a token ignores
    earlier tokens. But the weight of a call grows and shrinks with the call's length (verl's
    `rollout_is: sequence`).

    Args:
        old_logprobs, behaviour_logprobs: log π_old and log π_behaviour, of all tokens of the calls.
        calls: call number of each token, from 0.
        cap: C.
    """
    logs = _sums(old_logprobs - behaviour_logprobs, calls)
    weights = logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    return weights.to(old_logprobs.dtype)


def kl_divergence(logprobs: Tensor, base_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(π‖π_base) from tokens of π (J. Schulman, "Approximating KL divergence", 2020).

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
    """Return the entropy of each distribution.

    Args:
        log_distribution: [tokens, vocabulary], normalised.
    """
    # a probability of 0 has the logarithm -inf, and 0 · -inf would be NaN
    return -(log_distribution.exp() * log_distribution.clamp(min=torch.finfo().min)).sum(-1)
