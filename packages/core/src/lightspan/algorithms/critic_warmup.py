"""What an algorithm remembers of its critic: whether what it expects may be built on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from lightspan.lightning.batch import Batch
from lightspan.lightning.gae import explained_variance, warmup_lambda
from lightspan.protocols.learner import Critic
from lightspan.schema.records import Json
from lightspan.schema.validation import is_number


@dataclass(slots=True)
class CriticWarmup:
    """Of a run so far."""

    fits: int = 0
    """Iterations that the critic was fitted in."""
    explained: float | None = None
    """The variance that it explained of the last iteration's rewards-to-go, before it was fitted to
    any of them; None: not known. Of several policies the least."""

    def lam(self, critic: Critic) -> float:
        """lambda of the next iteration."""
        return warmup_lambda(
            critic.lam, fits=self.fits, warmup=critic.warmup, explained=self.explained
        )

    def learned(self, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take what it had expected of an iteration's calls, if updates fitted it to them. Returns
        what replaces of their metrics: the variance explained is that of the whole iteration."""
        if "value_loss" not in metrics:
            return {}
        self.fits += 1
        explained = _explained(batch)
        if explained is None:
            return {}
        self.explained = explained
        return {"explained_variance": explained}

    def as_json(self) -> dict[str, Json]:
        """For a checkpoint."""
        return {"fits": self.fits, "explained": self.explained}

    @classmethod
    def of(cls, state: object) -> CriticWarmup:
        """What `as_json` gave; nothing is known of a run without it."""
        if not isinstance(state, Mapping):
            return cls()
        fits, explained = state.get("fits"), state.get("explained")
        return cls(
            int(fits) if is_number(fits) else 0, float(explained) if is_number(explained) else None
        )


def _explained(batch: Batch) -> float | None:
    """The variance of the rewards-to-go that was explained before any update; of several policies
    the least.

    What a learner says of each of several minibatches will not do: they are dealt by rollout, so
    that from the second on it was fitted to others of the same groups.
    """
    expected = {
        (why.rollout_id, *call): why.expected for (_, *call), why in batch.explanations.items()
    }
    targets: dict[str, list[float]] = defaultdict(list)
    values: dict[str, list[float]] = defaultdict(list)
    for row in batch.rows:
        for key, target in zip(row.call_ids, row.value_targets, strict=True):
            if (value := expected[row.rollout_id, *key]) is not None:
                targets[row.policy].append(target)
                values[row.policy].append(value)
    explained = [explained_variance(values[policy], targets[policy]) for policy in targets]
    return min((part for part in explained if part is not None), default=None)
