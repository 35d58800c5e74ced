"""Compute the loss of each token from its log-probability; used by all learners."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lightspan.protocols.learner import PolicyLoss
from lightspan_torch.learner import losses
from lightspan_torch.learner.metrics import MetricAccumulator


class TokenValues(NamedTuple):
    """The inputs of the loss of n tokens, except their current log-probabilities.

    Each tensor has the shape [n].
    """

    behaviour: Tensor
    """Log-probabilities under the weights that sampled the token."""
    advantages: Tensor
    fresh: Tensor
    """True where the current weights sampled the token."""
    old: Tensor | None = None
    """Log-probabilities under the learner's weights before the update; None to use `behaviour`
    instead."""
    base: Tensor | None = None
    """Log-probabilities under the weights before training; None if the loss has no KL term."""
    call_ratios: Tensor | None = None
    """GSPO's ratio s of the token's call; None for other losses."""
    call_scales: Tensor | None = None
    """Factor of the gradient of GSPO's ratio; None if no token is forced by a grammar."""
    call_importance: Tensor | None = None
    """Importance weight of the token's call; None if the loss weights tokens, or does not
    weight."""
    call_kept: Tensor | None = None
    """0 for tokens of masked calls, else 1; None if the loss masks no calls."""

    def at(self, entries: Tensor) -> TokenValues:
        """Return the values of some of the tokens; `entries` are their indices."""
        return TokenValues(*(None if values is None else values[entries] for values in self))  # type: ignore[arg-type]


def policy_losses(
    loss: PolicyLoss,
    values: TokenValues,
    logprobs: Tensor,
    entropies: Tensor,
    metrics: MetricAccumulator,
) -> Tensor:
    """Return the loss of each token, [n], and add metrics of the tokens to `metrics`.

    The formulas are in `lightspan_torch.learner.losses`.

    Args:
        loss: the loss's settings.
        values: the inputs of the loss.
        logprobs: [n] log-probabilities under the current weights.
        entropies: [n] entropies; they must be differentiable if the loss has an entropy bonus.
        metrics: the accumulator of the update.
    """
    metrics.add_gap((logprobs.detach() - values.behaviour).abs(), values.fresh)
    old = values.behaviour if values.old is None else values.old
    clipped = _clipped_loss(loss, values, logprobs, old)
    per_token = clipped.loss
    if values.call_importance is not None:
        per_token = per_token * values.call_importance
    elif values.old is not None and loss.importance_cap is not None:
        weight = losses.importance_weight(old, values.behaviour, loss.importance_cap)
        per_token = per_token * weight
    if values.call_kept is not None:
        per_token = per_token * values.call_kept
    if values.base is not None:
        divergence = losses.kl_divergence(logprobs, values.base, loss.kl_estimator)
        per_token = per_token + loss.kl * divergence
        metrics.add("kl", divergence)
    if loss.entropy:
        per_token = per_token - loss.entropy * entropies
    metrics.add("entropy", entropies)
    metrics.add("clip_fraction", clipped.clipped)
    metrics.add("ratio_mean", clipped.ratio)
    metrics.update_max("ratio_max", clipped.ratio)
    return per_token


def _clipped_loss(
    loss: PolicyLoss, values: TokenValues, logprobs: Tensor, old: Tensor
) -> losses.ClippedLoss:
    advantages = values.advantages
    clip: Any = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    if values.call_ratios is not None:
        scales = values.call_scales
        return losses.gspo_loss(logprobs, values.call_ratios, advantages, scales=scales, **clip)
    if loss.form == "cispo":
        return losses.cispo_loss(logprobs, old, advantages, **clip)
    return losses.clipped_ratio_loss(logprobs, old, advantages, dual_clip=loss.dual_clip, **clip)
