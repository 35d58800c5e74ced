"""Critic warm-up: decide from when on a critic's values are used to compute advantages.

Until then, lambda of generalised advantage estimation is 1, with which advantages are unbiased even
if the values are bad.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec

from lightspan.lightning.advantages import ZeroReason
from lightspan.lightning.batch import Batch
from lightspan.lightning.gae import TRUSTED_VARIANCE, explained_variance
from lightspan.protocols.learner import Critic


def describe_critic(lam: float | None) -> str:
    """Return a line about a critic with lambda `lam`, for the output of `fit` and `inspect`."""
    text = "1" if lam is None or lam == 1 else f"{lam:g}, 1 until its values are trusted"
    return f"critic=: calls are compared with what a critic expects too (lambda {text})"


class CriticWarmup(msgspec.Struct):
    """Decides during a run from when on a critic's values are good enough to be used."""

    explained: float | None = None
    """Explained variance of the last iteration's rewards-to-go, before the critic was fitted to
    them; the minimum over policies. None before the first fit, or if it is unknown for a policy,
    because the rewards-to-go of its calls did not vary."""
    by_policy: dict[str, int] = {}
    """Policy → iterations in which its own critic was fitted. A checkpoint without it counts from
    0 again."""

    def lambda_(self, critic: Critic, policies: Collection[str]) -> float:
        """Return lambda of generalised advantage estimation for the next iteration.

        It is `critic.lam` once the critic of each policy was fitted often enough (`critic.warmup`)
        and the values predicted the rewards of the last iteration well enough (`TRUSTED_VARIANCE`).
        Until then it is 1: advantages are then unbiased even with a bad critic.

        Args:
            critic: settings of the critic.
            policies: policies of the iteration's rows.
        """
        fits = min((self.by_policy.get(policy, 0) for policy in policies), default=0)
        is_fitted = fits >= max(critic.warmup, 1)
        explained = 0.0 if self.explained is None else self.explained
        is_trusted = is_fitted and explained >= TRUSTED_VARIANCE
        return critic.lam if is_trusted and critic.lam is not None else 1.0

    def update(
        self, batch: Batch, metrics: Mapping[str, float], policies: Collection[str]
    ) -> dict[str, float]:
        """Update the state with the results of an iteration.

        Args:
            batch: batch of the iteration.
            metrics: the learner's metrics of the iteration.
            policies: policies of the rows to which the critic was fitted.

        Returns:
            The metric `explained_variance` of the whole iteration, which replaces the value in
            `metrics`. Empty if the critic was not fitted or the variance is unknown.
        """
        if "value_loss" not in metrics:  # the critic was not fitted
            return {}
        for policy in policies:
            self.by_policy[policy] = self.by_policy.get(policy, 0) + 1
        explained = _explained(batch)
        numbers = [part for part in explained if part is not None]
        self.explained = min(numbers) if numbers and len(numbers) == len(explained) else None
        return {"explained_variance": min(numbers)} if numbers else {}


def _explained(batch: Batch) -> list[float | None]:
    """Return how well values predicted the rewards that followed (explained variance), per policy.

    With groups, it is how well the mixture predicted them. Values are those before the
    iteration's first update. Groups of one rollout are left out, because the mixture has no mean
    for them. A policy's result is None if its rewards did not vary; policies without a critic's
    value are left out. The learner's metrics of minibatches cannot be used instead: rollouts of a
    group are in several minibatches, so from the second minibatch on the critic was already fitted
    to the group.
    """
    expected = {
        (why.rollout_id, *call): why.predicted
        for (_, *call), why in batch.explanations.items()
        if why.zero_reason is not ZeroReason.GROUP_OF_ONE
    }
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in batch.rows:
        for key, target in zip(row.call_ids, row.value_targets, strict=True):
            if (value := expected.get((row.rollout_id, *key))) is not None:
                pairs[row.policy].append((value, target))
    return [explained_variance(*zip(*each, strict=True)) for each in pairs.values()]
