"""Critic warm-up: decide from when on a critic's values are used to compute advantages.

Until then, lambda of generalised advantage estimation is 1, with which advantages are unbiased even
if the values are bad.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from lightspan.lightning.batch import Batch
from lightspan.lightning.gae import TRUSTED_VARIANCE, explained_variance
from lightspan.protocols.learner import Critic


class CriticWarmup(msgspec.Struct):
    """Decides during a run from when on a critic's values are good enough to be used."""

    fits: int = 0
    """Iterations in which the critic was fitted."""
    explained: float | None = None
    """Explained variance of the last iteration's rewards-to-go, before the critic was fitted to
    them; the minimum over policies. None before the first fit, or if no policy has a value."""

    def lambda_(self, critic: Critic) -> float:
        """Return lambda of generalised advantage estimation for the next iteration.

        It is `critic.lam` once the critic was fitted often enough (`critic.warmup`) and its values
        predict rewards well enough (`TRUSTED_VARIANCE`). Until then it is 1: advantages are then
        unbiased even with a bad critic.
        """
        is_fitted = self.fits >= max(critic.warmup, 1)
        explained = 0.0 if self.explained is None else self.explained
        is_trusted = is_fitted and explained >= TRUSTED_VARIANCE
        return critic.lam if is_trusted and critic.lam is not None else 1.0

    def update(self, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Update the state with the results of an iteration.

        Args:
            batch: batch of the iteration.
            metrics: the learner's metrics of the iteration.

        Returns:
            The metric `explained_variance` of the whole iteration, which replaces the value in
            `metrics`. Empty if the critic was not fitted or the variance is unknown.
        """
        if "value_loss" not in metrics:  # the critic was not fitted
            return {}
        self.fits += 1
        explained = _explained(batch)
        if explained is None:
            return {}
        self.explained = explained
        return {"explained_variance": explained}


def _explained(batch: Batch) -> float | None:
    """Return how well the critic's values predicted the rewards that followed (explained variance).

    With groups, it is how well the mixture predicted them. Values are those before the
    iteration's first update. The result is the minimum over policies; None if no policy has a
    critic's value. The learner's metrics of minibatches cannot be
    used instead: rollouts of a group are in several minibatches, so from the second minibatch on
    the critic was already fitted to the group.
    """
    explanations = batch.explanations.items()
    expected = {(why.rollout_id, *call): why.predicted for (_, *call), why in explanations}
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in batch.rows:
        for key, target in zip(row.call_ids, row.value_targets, strict=True):
            if (value := expected[row.rollout_id, *key]) is not None:
                pairs[row.policy].append((value, target))
    explained = [explained_variance(*zip(*each, strict=True)) for each in pairs.values()]
    return min((part for part in explained if part is not None), default=None)
