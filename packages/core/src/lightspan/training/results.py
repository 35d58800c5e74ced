"""Results of evaluating and of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lightspan.lightning.episode import Episode
from lightspan.lightning.health import app_failed
from lightspan.schema.records import Json
from lightspan.training.statistics import Interval, mean_interval, paired_gain


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out rewards after a step; step 0 is before training."""

    step: int
    rewards: dict[str, float]
    """Task id → reward; unscored tasks are not in it."""
    unscored: int = 0
    """Tasks without a usable reward, which is not a reward of zero."""
    failed: int = 0
    """Tasks on which the app failed, scored or not."""

    @classmethod
    def of(cls, step: int, episodes: Sequence[Episode]) -> Evaluation:
        """The evaluation of these episodes, one per task."""
        rewards = {e.task_id: e.reward for e in episodes if e.reward is not None}
        return cls(
            step=step,
            rewards=rewards,
            unscored=len(episodes) - len(rewards),
            failed=sum(map(app_failed, episodes)),
        )

    @property
    def interval(self) -> Interval:
        """Mean reward with its 95 % interval."""
        return mean_interval(list(self.rewards.values()))

    @property
    def _counts(self) -> dict[str, int]:
        return {"unscored": self.unscored, "failed": self.failed}

    def metrics(self) -> dict[str, Json]:
        """The line of `metrics.jsonl`."""
        return {**msgspec.to_builtins(self.interval), **self._counts}

    def text(self, metric: str) -> str:
        """One line for people."""
        odd = "".join(f", {count} {name}" for name, count in self._counts.items() if count)
        return f"step {self.step}: held-out {metric} {self.interval}{odd}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """What training gave."""

    folder: Path
    model: Path
    """The trained model (with several policies: one folder each inside)."""
    evaluations: tuple[Evaluation, ...]
    seconds: Mapping[str, float]
    """CPU-seconds of `engine` and `learner` in training; evaluation apart, as
    `engine_evaluation` and `learner_evaluation`."""
    steps: int

    @property
    def gain(self) -> Interval | None:
        """The gain from the first to the last evaluation, paired by task; None without two that
        share scored tasks."""
        if len(self.evaluations) < 2:
            return None
        gain = paired_gain(self.evaluations[0].rewards, self.evaluations[-1].rewards)
        return gain if gain.n else None

    def summary(self, metric: str = "reward") -> str:
        """The line to end with."""
        if self.gain is None:
            return f"trained for {self.steps} steps: {self.folder}"
        first, last = self.evaluations[0].interval, self.evaluations[-1].interval
        return (
            f"held-out {metric}: {first.mean:.2f} -> {last.mean:.2f} (n={last.n}, 95% CI of the "
            f"gain {self.gain.low:.2f}..{self.gain.high:.2f})"
        )
