"""Critic warm-up: whether a critic's values are good enough for lambda below 1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from lightspan.lightning.batch import Batch
from lightspan.lightning.gae import explained_variance, warmup_lambda
from lightspan.protocols.learner import Critic


class CriticWarmup(msgspec.Struct):
    """State of a run's critic."""

    fits: int = 0
    """Iterations in which the critic was fitted."""
    explained: float | None = None
    """Variance of the last iteration's rewards-to-go that the critic explained before it was fitted
    to them, the least of several policies; None if unknown."""

    def lambda_(self, critic: Critic) -> float:
        """Return lambda for the next iteration."""
        return warmup_lambda(
            critic.lam, fits=self.fits, warmup=critic.warmup, explained=self.explained
        )

    def update(self, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Update the state after an iteration. Returns the metrics to replace: the explained
        variance of the whole iteration."""
        if "value_loss" not in metrics:  # the critic was not fitted
            return {}
        self.fits += 1
        explained = _explained(batch)
        if explained is None:
            return {}
        self.explained = explained
        return {"explained_variance": explained}


def _explained(batch: Batch) -> float | None:
    """Return the explained variance of the rewards-to-go before any update, the least of several
    policies.

    The learner's metrics of minibatches do not serve: rollouts of one group are in several
    minibatches, so from the second one on the critic was already fitted to the group.
    """
    expected = {
        (why.rollout_id, *call): why.expected for (_, *call), why in batch.explanations.items()
    }
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in batch.rows:
        for key, target in zip(row.call_ids, row.value_targets, strict=True):
            if (value := expected[row.rollout_id, *key]) is not None:
                pairs[row.policy].append((value, target))
    explained = [explained_variance(*zip(*each, strict=True)) for each in pairs.values()]
    return min((part for part in explained if part is not None), default=None)
