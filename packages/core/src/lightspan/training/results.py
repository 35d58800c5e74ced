"""Results of evaluating and of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lightspan.lightning.episode import Episode
from lightspan.lightning.health import app_failed
from lightspan.schema import conventions as c
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
    temperatures: dict[str, list[float]] = {}
    """Agent path → what its calls were sampled at, as far as that is known."""
    weights: int | None = None
    """The step whose weights were evaluated, if an earlier one's were (`keep="best"`)."""

    @classmethod
    def of(
        cls, step: int, episodes: Sequence[Episode], *, weights: int | None = None
    ) -> Evaluation:
        """The evaluation of these episodes, one per task."""
        rewards = {e.task_id: e.reward for e in episodes if e.reward is not None}
        return cls(
            step=step,
            rewards=rewards,
            unscored=len(episodes) - len(rewards),
            failed=sum(map(app_failed, episodes)),
            temperatures=_temperatures(episodes),
            weights=weights,
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
        of = {} if self.weights is None else {"weights": self.weights}
        return {**msgspec.to_builtins(self.interval), **self._counts, **of}

    def text(self, metric: str, split: str = "held-out") -> str:
        """One line for people."""
        odd = "".join(f", {count} {name}" for name, count in self._counts.items() if count)
        of = "" if self.weights is None else f" with the weights of step {self.weights}"
        return f"step {self.step}: {split} {metric}{of} {self.interval}{odd}{self._sampled}"

    @property
    def _sampled(self) -> str:
        """At which temperatures, for people."""
        agents = {
            agent: " and ".join(f"{value:g}" for value in values)
            for agent, values in self.temperatures.items()
        }
        several = set(agents.values())
        if len(several) == 1:
            return f"; sampled at temperature {several.pop()}"
        named = ", ".join(f"{agent} at {value}" for agent, value in agents.items())
        return f"; sampled at temperature: {named}" if named else ""


def _temperatures(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    found: dict[str, set[float]] = defaultdict(set)
    for call in (call for episode in episodes for call in episode.calls):
        asked = None if call.span is None else call.span.attributes.get(c.REQUEST_TEMPERATURE)
        if call.record is not None:
            found[call.agent_path].add(call.record.sampling.temperature)
        elif isinstance(asked, int | float):
            found[call.agent_path].add(float(asked))
    return {agent: sorted(values) for agent, values in sorted(found.items())}


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
    kept: Evaluation | None = None
    """With `keep="best"`: the evaluation on the selection split by which the weights of its step
    were kept. Its score is too high, since it is the highest of several; the last of `evaluations`
    has the held-out reward of the same weights."""

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
        of = "" if self.kept is None else f", keeping step {self.kept.step}"
        if self.gain is None:
            return f"trained for {self.steps} steps{of}: {self.folder}"
        first, last = self.evaluations[0].interval, self.evaluations[-1].interval
        return (
            f"held-out {metric}: {first.mean:.2f} -> {last.mean:.2f} (n={last.n}, 95% CI of the "
            f"gain {self.gain.low:.2f}..{self.gain.high:.2f}){of}"
        )
