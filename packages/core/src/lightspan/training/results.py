"""Results of evaluating and of training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.lightning.episode import Episode
from lightspan.lightning.rollout_checks import app_failed
from lightspan.progress import plural
from lightspan.schema import semconv as c
from lightspan.schema.prompts import LearnedPrompt
from lightspan.schema.records import Json
from lightspan.schema.routing import Routing
from lightspan.schema.validation import is_number
from lightspan.training.statistics import Interval, clustered_interval, paired_gain


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out rewards after a step; step 0 is before training."""

    step: int
    rewards: dict[str, float]
    """Task id → reward; unscored tasks are not in it."""
    unscored: int = 0
    """Tasks without a usable reward, which is not a reward of zero."""
    failed: int = 0
    """Tasks on which the app failed, scored or not."""
    temperatures: dict[str, list[float | None]] = {}
    """Agent path → what its calls were sampled at; None: whatever the endpoint that answered takes
    where a request does not say."""
    weights: int | None = None
    """The step whose weights were evaluated, if an earlier one's were (`keep="best"`)."""
    clusters: dict[str, str] = {}
    """Task id → the cluster that it is in; empty where each task stands for itself."""

    @classmethod
    def of(
        cls,
        step: int,
        episodes: Sequence[Episode],
        *,
        routing: Routing,
        weights: int | None = None,
        clusters: Mapping[str, str] | None = None,
    ) -> Evaluation:
        """The evaluation of these episodes, one per task.

        Args:
            routing: where their calls went.
        """
        rewards = {e.task_id: e.reward for e in episodes if e.reward is not None}
        return cls(
            step=step,
            rewards=rewards,
            unscored=len(episodes) - len(rewards),
            failed=sum(map(app_failed, episodes)),
            temperatures=_temperatures(episodes, routing),
            weights=weights,
            clusters=dict(clusters or {}),
        )

    @property
    def mean(self) -> float:
        """Mean reward of the scored tasks; NaN where there is none."""
        if not self.rewards:
            return math.nan
        return math.fsum(self.rewards.values()) / len(self.rewards)

    @property
    def interval(self) -> Interval:
        """Mean reward with its 95 % interval, over clusters where there are any."""
        return clustered_interval(self.rewards, self.clusters)

    @property
    def _counts(self) -> dict[str, int]:
        return {"unscored": self.unscored, "failed": self.failed}

    def metrics(self) -> dict[str, Json]:
        """The line of `metrics.jsonl`."""
        of = {} if self.weights is None else {"weights": self.weights}
        return {**msgspec.to_builtins(self.interval), **self._counts, **of}

    def text(self, metric: str, split: str = "held-out") -> str:
        """One line for people."""
        odd = counted(self._counts)
        odd = f", {odd}" if odd else ""
        of = "" if self.weights is None else f" with the weights of step {self.weights}"
        return f"step {self.step}: {split} {metric}{of} {self.interval}{odd}{self._sampled}"

    @property
    def _sampled(self) -> str:
        """At which temperatures, for people."""
        agents = {
            agent: " and ".join(_ENDPOINTS if value is None else f"{value:g}" for value in values)
            for agent, values in self.temperatures.items()
        }
        several = set(agents.values())
        if several == {_ENDPOINTS}:
            return f"; sampled at {_ENDPOINTS} temperature"
        if len(several) == 1:
            return f"; sampled at temperature {several.pop()}"
        named = ", ".join(f"{agent} at {value}" for agent, value in agents.items())
        return f"; sampled at temperature: {named}" if named else ""


_ENDPOINTS: Final = "its endpoint's own"


def _temperatures(episodes: Sequence[Episode], routing: Routing) -> dict[str, list[float | None]]:
    found: dict[str, set[float | None]] = defaultdict(set)
    for call in (call for episode in episodes for call in episode.calls):
        if call.record is not None:
            found[call.agent_path].add(call.record.sampling.temperature)
        elif call.span is not None:
            endpoint = routing.target(call.agent_path).endpoint
            given = {} if endpoint is None else endpoint.sampling  # whatever the app asks
            asked = given.get("temperature", call.span.attributes.get(c.REQUEST_TEMPERATURE))
            found[call.agent_path].add(float(asked) if isinstance(asked, int | float) else None)
    return {
        agent: sorted(values, key=lambda value: math.inf if value is None else value)
        for agent, values in sorted(found.items())
    }


class Outcomes(NamedTuple):
    """What became of the rollouts that were to be trained on, over all lives of a run."""

    rollouts: int = 0
    unscored: int = 0
    """Without a usable reward: nothing was learned from them, and no mean has them."""
    failed: int = 0
    """On which the app failed, scored or not."""

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, Any]]) -> Outcomes:
        """Those of the lines of `metrics.jsonl`, as far as they count them."""
        lines = [line for line in metrics if line["kind"] == "train" and _counts_rollouts(line)]
        return cls(
            rollouts=sum(int(line["rollouts"]) for line in lines),
            unscored=sum(int(line["rollouts"] - line["scored"]) for line in lines),
            failed=sum(int(line["failed"]) for line in lines),
        )

    @property
    def odd(self) -> str:
        """Those that went wrong, for people; empty if none did."""
        return counted({"unscored": self.unscored, "failed": self.failed})

    def __str__(self) -> str:
        return f"of {plural(self.rollouts, 'rollout')} in training {self.odd}" if self.odd else ""


def _counts_rollouts(line: Mapping[str, Any]) -> bool:
    """An algorithm of one's own may count nothing, or say anything."""
    return all(is_number(line.get(name)) for name in ("rollouts", "scored", "failed"))


def counted(counts: Mapping[str, int]) -> str:
    """What a mean does not say: each count that is not 0; empty if all are."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """What training gave."""

    folder: Path
    model: Path | None
    """The trained model (with several policies: one folder each inside); None where no policy was
    trained."""
    evaluations: tuple[Evaluation, ...]
    seconds: Mapping[str, float]
    """CPU-seconds of `engine` and `learner` in training; evaluation apart, as
    `engine_evaluation` and `learner_evaluation`."""
    steps: int
    kept: Evaluation | None = None
    """With `keep="best"`: the evaluation on the selection split by which the weights of its step
    were kept. Its score is too high, since it is the highest of several; the last of `evaluations`
    has the held-out reward of the same weights."""
    outcomes: Outcomes = field(default_factory=Outcomes)
    """What became of the rollouts in training."""
    prompts: Mapping[str, LearnedPrompt] = field(default_factory=dict)
    """The prompts that were learned, by name, and what they were before."""

    @property
    def gain(self) -> Interval | None:
        """The gain from the first to the last evaluation, paired by task; None without two that
        share scored tasks."""
        if len(self.evaluations) < 2:
            return None
        first, last = self.evaluations[0], self.evaluations[-1]
        gain = paired_gain(first.rewards, last.rewards, last.clusters)
        return gain if gain.n else None

    def summary(self, metric: str = "reward") -> str:
        """The line to end with. Means are of scored tasks, the gain of those that were scored both
        times: how many were not stands beside them, and on how many tasks and rollouts the app
        failed."""
        of = "" if self.kept is None else f", keeping step {self.kept.step}"
        trained = f"; {self.outcomes}" if str(self.outcomes) else ""
        gain = self.gain
        if gain is None:
            return f"trained for {self.steps} steps{of}{trained}: {self.folder}"
        first, last = self.evaluations[0], self.evaluations[-1]
        return (
            f"held-out {metric}: {first.mean:.2f} -> {last.mean:.2f} ({gain.size}, 95% CI of the "
            f"gain {gain.low:.2f}..{gain.high:.2f}){_left_out(first, last)}{of}{trained}"
        )


def _left_out(first: Evaluation, last: Evaluation) -> str:
    """The tasks that were not scored, and those on which the app failed, before and after."""
    pairs = {"unscored": (first.unscored, last.unscored), "failed": (first.failed, last.failed)}
    parts = [f"{name} {before} -> {after}" for name, (before, after) in pairs.items()]
    some = [part for part, counts in zip(parts, pairs.values(), strict=True) if any(counts)]
    return f"; held out: {', '.join(some)}" if some else ""
