"""Losses of tokens, as pure functions of tensors. All tensors have the shape [tokens].

A learner minimises Σ weight · loss over tokens. Losses are never divided by the number of tokens or
rows here, because the weights (`Row.weights`) include such factors.

What the papers call a *sequence* is here a call: the tokens of one sampled answer. A row may have
several calls. Its tokens outside calls do not affect the loss. The argument `calls` has the number
of each token's call.

| form | loss of a token | source |
|---|---|---|
| `clip` | max(-A·r, -A·clip(r, 1 - low, 1 + high)), dual clip | PPO, arXiv 1707.06347 |
| `gspo` | max(-A·s, -A·clip(s, 1 - low, 1 + high)) | GSPO, 2507.18071 |
| `cispo` | -sg[clip(r, 1 - low, 1 + high)] · A · log π | MiniMax-M1, 2506.13585 |

with A the advantage, r = π/π_old of the token, s = exp(mean of log r over the call's tokens that a
grammar did not force), and sg[…] without gradient.

The papers divide these losses by different numbers, which here are the row's weights: PPO has the
mean over tokens; GSPO (eq. 5) the mean over sequences, `LightningRL(weight="transition")`; CISPO
(eq. 4) the mean over all tokens of a group's answers, close to `weight="token"`, the mean over
those of the step. The default, `weight="rollout"`, is none of these for rollouts of several calls.

Notation: π is the policy that is trained. π_old is the denominator of the clipped ratio.
π_behaviour is the policy from which the engine sampled the token. There are two forms (decoupled
PPO, arXiv 2110.00641; verl's rollout correction, "bypass mode"). They are never mixed, because the
difference between engine and learner would count twice:

- *bypass*: π_old := π_behaviour, the recorded log-probabilities. The clipped ratio is itself the
  importance weight, and `importance_weight` is not used.
- *decoupled*: π_old is the learner's own score from before the update;
  loss = w · L(π/π_old) with w = min(π_old/π_behaviour, C) (truncated importance sampling), of the
  token, or of the call: w = min(Π π_old/π_behaviour, C) over its tokens. verl calls these
  `rollout_is: token` and `rollout_is: sequence`. Calls with Π π_old/π_behaviour above a bound can
  be left out (`call_kept`).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from lightspan.protocols.learner import KLEstimator

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are clamped to ± this limit, as in verl, so that exp stays finite."""


class ClippedLoss(NamedTuple):
    """A loss, its ratio, and where the ratio was clipped. Each tensor has the shape [tokens]."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """True where clipping removed the token's gradient; for CISPO, where it bounded the
    gradient."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return log(π_a/π_b), clamped to ±`LOG_RATIO_LIMIT`.

    Args:
        numerator: log π_a of each token.
        denominator: log π_b of each token.
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
    limits the gradient of a bad token whose probability has grown.

    Args:
        logprobs: log π of each token.
        old_logprobs: log π_old of each token.
        advantages: A of each token.
        clip_low: low.
        clip_high: high.
        dual_clip: c; None for no dual clip.
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
    """Return max(-A·ratio, -A·clip(ratio)) for each token, and True where clipping changed it."""
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
    scales: Tensor | None = None,
) -> ClippedLoss:
    """Compute GSPO's loss (arXiv 2507.18071): PPO's loss, with one ratio for the whole call.

    The ratio is s, as defined in the module's docstring. The loss of each token is L = max(-A·s,
    -A·clip(s, 1 - low, 1 + high)).

    The gradient of each token is that of s·π/sg[π], which is s·∇ log π. The paper calls this
    GSPO-token, and verl uses it too. It needs no other token's gradient. The gradient of s itself
    would be s · mean(∇ log π) over the call's tokens. If advantages and weights are equal within a
    call, both gradients have the same sum over the call. If they differ, as with importance weights
    per token, GSPO-token is meant.

    The weights divide by the number of all tokens of a call, and forced tokens have no gradient.
    So the gradient of the others is multiplied by `scales`; the value of the loss is not.

    Args:
        logprobs: log π of each token.
        call_ratios: s of each token's call, as returned by the function `call_ratios`.
        advantages: A of each token.
        clip_low: low.
        clip_high: high.
        scales: factor of each token's gradient, as returned by the function `call_scales`; None
            for 1.
    """
    # π/sg[π] is 1, and its gradient is that of log π
    change = logprobs - logprobs.detach()
    ratio = call_ratios * (change if scales is None else scales * change).exp()
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

    Clipping limits the factor clip(r), but the token keeps a gradient. In the result, `clipped` is
    True where the factor was limited. The value of the loss has no meaning, only its gradient.
    """
    ratio = log_ratio(logprobs.detach(), old_logprobs).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return ClippedLoss(-bounded * advantages * logprobs, ratio, bounded != ratio)


def call_ratios(
    logprobs: Tensor, old_logprobs: Tensor, calls: Tensor, forced: Tensor | None = None
) -> Tensor:
    """Return for each token s = exp(mean of log π/π_old over the token's call), without gradient.

    Forced tokens are not in the mean: the policy does not choose them, and their ratio is always 1.
    In the mean they would move s towards 1, so that an answer of mostly forced tokens would hardly
    ever be clipped. GSPO's paper has no such tokens.

    Args:
        logprobs: log π of each token.
        old_logprobs: log π_old of each token.
        calls: number of each token's call, from 0.
        forced: True for each token that was the only one its grammar allowed; None for none.
    """
    free = torch.ones_like(logprobs) if forced is None else (~forced).to(logprobs.dtype)
    sums = _sums((logprobs - old_logprobs) * free, calls)
    counts = _sums(free, calls).clamp(min=1.0)
    return (sums / counts).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().to(logprobs.dtype)


def call_scales(calls: Tensor, forced: Tensor) -> Tensor:
    """Return for each token T/n, with T tokens in its call of which n are not forced; T if n is 0.

    Args:
        calls: number of each token's call, from 0.
        forced: True for each token that was the only one its grammar allowed.
    """
    sizes, free = _sums(torch.ones_like(forced), calls), _sums(~forced, calls)
    return (sizes / free.clamp(min=1.0)).float()


def _sums(values: Tensor, calls: Tensor) -> Tensor:
    """Return for each token the sum of `values` over the token's call, in float64.

    In float32, the rounding error in the sum of a long call would be as large as GSPO's clip
    bounds.
    """
    size = int(calls.max()) + 1 if len(calls) else 0
    totals = torch.zeros(size, dtype=torch.float64, device=values.device)
    return totals.index_add(0, calls, values.detach().double())[calls]


def importance_weight(old_logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """Return the truncated importance weight w = min(π_old/π_behaviour, C), without gradient.

    Args:
        old_logprobs: log π_old of each token.
        behaviour_logprobs: log π_behaviour of each token.
        cap: C.
    """
    return log_ratio(old_logprobs, behaviour_logprobs).exp().clamp(max=cap).detach()


def call_importance_weight(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, calls: Tensor, cap: float
) -> Tensor:
    """Return for each token w = min(Π π_old/π_behaviour over its call, C), without gradient.

    Unlike a weight per token, this weight accounts for the earlier tokens of the call. It is
    unbiased except for the cap. But it differs more from 1 the longer the call is. verl calls it
    `rollout_is: sequence`.

    Args:
        old_logprobs: log π_old of each token.
        behaviour_logprobs: log π_behaviour of each token.
        calls: number of each token's call, from 0.
        cap: C.
    """
    logs = _sums(old_logprobs - behaviour_logprobs, calls)
    weights = logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    return weights.to(old_logprobs.dtype)


def call_kept(
    old_logprobs: Tensor, behaviour_logprobs: Tensor, calls: Tensor, bound: float
) -> Tensor:
    """Return for each token 1 if Π π_old/π_behaviour over its call is at most `bound`, else 0.

    Calls above the bound get no gradient. TRL 1.16 does so by default with vLLM
    (`vllm_importance_sampling_mode="sequence_mask"`, bound 3). verl calls it rejection sampling.

    Args:
        old_logprobs: log π_old of each token.
        behaviour_logprobs: log π_behaviour of each token.
        calls: number of each token's call, from 0.
        bound: maximum ratio of a call.
    """
    logs = _sums(old_logprobs - behaviour_logprobs, calls)
    return (logs <= math.log(bound)).to(old_logprobs.dtype)


def kl_divergence(logprobs: Tensor, base_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(π‖π_base) from tokens of π (J. Schulman, "Approximating KL divergence", 2020).

    With x = log π - log π_base:
    - k2 = x²/2: biased value; as a loss, its expected gradient is that of KL(π‖π_base).
    - k3 = exp(-x) - 1 + x: unbiased, never negative; as a loss, its expected gradient is that of
      KL(π_base‖π). This is the term of GRPO (arXiv 2402.03300, eq. 4).

    These gradients hold per token, for the distributions of the next token after the sampled
    prefix: that π chose the prefix too is not differentiated, so they are not those of the KL
    divergence of whole answers. They hold for tokens that π sampled. Tokens of older weights or of
    another engine are not reweighted here; DeepSeek-V3.2 (2512.02556) and TRL 1.16 multiply k3 by
    π/π_old, whose gradient is that of KL(π‖π_base).

    x itself, called k1, is no loss: its expected gradient is zero.
    """
    x = log_ratio(logprobs, base_logprobs)
    match estimator:
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(-x) + x


def reverse_kl(log_student: Tensor, log_teacher: Tensor) -> Tensor:
    """Return KL(p‖q) of each pair of distributions of the next token, [distributions].

    The gradient is Σ_y ∇p(y) · (log p(y) - log q(y)), which is that of the divergence, because the
    further term Σ_y p(y) · ∇log p(y) is 0. It is the expectation over y ~ p of the gradient of the
    policy loss with the advantage log q(y) - log p(y).

    Args:
        log_student: [distributions, vocabulary] log p; -inf for tokens that a grammar forbids.
        log_teacher: [distributions, vocabulary] log q, likewise.
    """
    with torch.no_grad():
        difference = log_ratio(log_student, log_teacher)
        # -inf minus -inf is NaN, and the token has no part in the sum
        difference.masked_fill_(log_student == -math.inf, 0.0)
    return (log_student.exp() * difference).sum(-1)


def entropy(log_distribution: Tensor) -> Tensor:
    """Return the entropy of each distribution, [tokens].

    Args:
        log_distribution: [tokens, vocabulary] normalised log-probabilities.
    """
    # a probability of 0 has the logarithm -inf, and 0 · -inf would be NaN
    return -(log_distribution.exp() * log_distribution.clamp(min=torch.finfo().min)).sum(-1)
