"""What every learner minimises for a token, however it came by the token's log-probability."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lightspan.protocols.learner import PolicyLoss
from lightspan_torch.learner import losses
from lightspan_torch.learner.metrics import MetricAccumulator


class TokenValues(NamedTuple):
    """What the loss of n tokens depends on, beside the model; each of shape [n]."""

    behaviour: Tensor
    advantages: Tensor
    fresh: Tensor
    """True where the very weights that are about to be updated sampled the token."""
    old: Tensor | None = None
    base: Tensor | None = None
    """Log-probabilities under the weights of before training."""
    call_ratios: Tensor | None = None
    """GSPO's ratio of the token's call."""
    call_importance: Tensor | None = None
    """The importance weight of the token's call."""


def policy_losses(
    loss: PolicyLoss,
    values: TokenValues,
    logprobs: Tensor,
    spread: Tensor,
    tally: MetricAccumulator,
) -> Tensor:
    """[n] losses; see `lightspan_torch.learner.losses`. The tally gets what they add up to.

    Args:
        spread: [n] entropies, with a graph where there is a bonus for them.
    """
    tally.add_gap((logprobs.detach() - values.behaviour).abs(), values.fresh)
    old = values.behaviour if values.old is None else values.old
    clipped = _of_form(loss, values, logprobs, old)
    per_token = clipped.loss
    if values.call_importance is not None:
        per_token = per_token * values.call_importance
    elif values.old is not None and loss.importance_cap is not None:
        weight = losses.importance_weight(old, values.behaviour, loss.importance_cap)
        per_token = per_token * weight
    if values.base is not None:
        divergence = losses.kl_divergence(logprobs, values.base, loss.kl_estimator)
        per_token = per_token + loss.kl * divergence
        tally.add("kl", divergence)
    if loss.entropy:
        per_token = per_token - loss.entropy * spread
    tally.add("entropy", spread)
    tally.add("clip_fraction", clipped.clipped)
    tally.add("ratio_mean", clipped.ratio)
    tally.peak("ratio_max", clipped.ratio)
    return per_token


def _of_form(
    loss: PolicyLoss, values: TokenValues, logprobs: Tensor, old: Tensor
) -> losses.ClippedLoss:
    """The loss by its form."""
    advantages = values.advantages
    low, high = loss.clip_low, loss.clip_high
    if values.call_ratios is not None:
        ratios = values.call_ratios
        return losses.gspo_loss(logprobs, ratios, advantages, clip_low=low, clip_high=high)
    if loss.form == "cispo":
        return losses.cispo_loss(logprobs, old, advantages, clip_low=low, clip_high=high)
    return losses.clipped_ratio_loss(
        logprobs, old, advantages, clip_low=low, clip_high=high, dual_clip=loss.dual_clip
    )
