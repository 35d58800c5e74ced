"""What an algorithm remembers of its critic: whether what it expects may be built on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightspan.learners.protocol import Critic
from lightspan.lightning.values import trusted_lambda
from lightspan.schema.checks import is_number
from lightspan.schema.records import Json


@dataclass(slots=True)
class Expectations:
    """Of a run so far."""

    fits: int = 0
    """Iterations that the critic was fitted in."""
    explained: float | None = None
    """The variance that it explained of the last iteration's rewards-to-go, before it was fitted to
    them; None: not known."""

    def lam(self, critic: Critic) -> float:
        """lambda of the next iteration."""
        return trusted_lambda(
            critic.lam, fits=self.fits, warmup=critic.warmup, explained=self.explained
        )

    def learned(self, metrics: Mapping[str, float]) -> None:
        """Take what an iteration's updates say of the critic."""
        if "value_loss" in metrics:
            self.fits += 1
            self.explained = metrics.get("explained_variance", self.explained)

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
