"""What an algorithm remembers of its critic: whether what it expects may be built on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightspan.learners.protocol import Critic
from lightspan.lightning.episode import CallKey
from lightspan.lightning.rows import Row
from lightspan.lightning.values import explained_variance, trusted_lambda
from lightspan.schema.checks import is_number
from lightspan.schema.records import Json


@dataclass(slots=True)
class Expectations:
    """Of a run so far."""

    fits: int = 0
    """Iterations that the critic was fitted in."""
    explained: float | None = None
    """The variance that it explained of the last iteration's rewards-to-go, before it was fitted to
    any of them; None: not known. Of several policies the least."""
    _compared: float | None = field(default=None, init=False)
    """The same of the iteration that is under way."""

    def lam(self, critic: Critic) -> float:
        """lambda of the next iteration."""
        return trusted_lambda(
            critic.lam, fits=self.fits, warmup=critic.warmup, explained=self.explained
        )

    def compare(self, rows: Sequence[Row], expected: Mapping[str, Mapping[CallKey, float]]) -> None:
        """Take what it expected of an iteration's calls, before any update of it.

        What a learner says of each of several minibatches will not do: they are dealt by rollout,
        so that from the second on it was fitted to others of the same groups.

        Args:
            rows: with the rewards-to-go as value targets.
            expected: rollout → call → value.
        """
        targets: dict[str, list[float]] = defaultdict(list)
        values: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            targets[row.policy] += row.value_targets
            values[row.policy] += [expected[row.rollout_id][key] for key in row.call_ids]
        explained = [explained_variance(values[policy], targets[policy]) for policy in targets]
        known = [part for part in explained if part is not None]
        self._compared = min(known) if known else None

    def learned(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take what an iteration's updates say of the critic. Returns what replaces of it: the
        variance explained is that of the whole iteration."""
        if "value_loss" not in metrics:
            return {}
        self.fits += 1
        if self._compared is None:
            return {}
        self.explained = self._compared
        return {"explained_variance": self.explained}

    def as_json(self) -> dict[str, Json]:
        """For a checkpoint."""
        return {"fits": self.fits, "explained": self.explained}

    @classmethod
    def of(cls, state: object) -> Expectations:
        """What `as_json` gave; nothing is known of a run without it."""
        if not isinstance(state, Mapping):
            return cls()
        fits, explained = state.get("fits"), state.get("explained")
        return cls(
            int(fits) if is_number(fits) else 0, float(explained) if is_number(explained) else None
        )
