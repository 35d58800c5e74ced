"""Results of evaluation and of training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.lightning.episode import Episode, dimension_means, named_means, policy_calls
from lightspan.lightning.rollout_checks import app_failed, failed_with_reward, is_silent
from lightspan.progress import plural
from lightspan.schema import semconv as c
from lightspan.schema.prompts import LearnedPrompt
from lightspan.schema.records import Json
from lightspan.schema.routing import Route, Routing
from lightspan.schema.system_prompts import OTHER_TEXTS
from lightspan.schema.validation import is_number
from lightspan.training.statistics import Interval, clustered_interval, paired_gain


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards that tasks got in an evaluation after a step; step 0 is before training."""

    step: int
    rewards: dict[str, float]
    """Task id → reward, of scored tasks."""
    unscored: int = 0
    """Number of tasks without a valid reward; they are not counted as a reward of zero."""
    failed: int = 0
    """Number of tasks on which the app failed, scored or not."""
    temperatures: dict[str, list[float | None]] = {}
    """Agent path → sampling temperatures of its calls; None in the list means the endpoint's
    default.
    """
    weights: int | None = None
    """Step whose weights were evaluated, if `keep="best"` restored an earlier step; None for the
    weights of `step`.
    """
    clusters: dict[str, str] = {}
    """Task id → cluster of correlated tasks; empty if tasks are independent."""
    policy_calls: int | None = None
    """Number of calls that the trained policies answered or refused; without policies, of all model
    calls. None if unknown.
    """
    silent: int = 0
    """Number of tasks that the app finished without such a call: their rewards say nothing of the
    policies. 0 without policies.
    """
    dimensions: dict[str, float] = {}
    """`dimension/NAME` → mean of a named reward; `dimension_n/NAME` as `dimension_means` has it."""
    failures: list[str] = []
    """Ids of the tasks whose reward is `failure_reward`, because the app failed."""
    failures_scored: list[str] = []
    """Ids of the tasks on which the app failed after it had given a reward, which counts."""
    failure_reward: float | None = None
    """Reward of failures at the time; None if they were unscored."""
    lowest_reward: float = 0.0
    """Lowest reward of the run so far, of training too; 0 if none was negative."""
    own_text: int = 0
    """Number of tasks on which a text of the app was sent that a learned one replaces, because it
    is another than the run has read: the app was changed, or has several."""

    @classmethod
    def of(
        cls,
        step: int,
        episodes: Sequence[Episode],
        routing: Routing,
        weights: int | None = None,
        clusters: Mapping[str, str] | None = None,
        failure_reward: float | None = None,
        lowest_reward: float = 0.0,
    ) -> Evaluation:
        """Return the evaluation of episodes, one per task.

        Args:
            step: current step.
            episodes: episodes in val mode.
            routing: the rules by which each agent's calls went to a policy or an endpoint.
            weights: step of the evaluated weights, if earlier than `step`; else None.
            clusters: cluster of correlated tasks, by task id; None if tasks are independent.
            failure_reward: reward of the episodes whose app failed; None if they are unscored.
            lowest_reward: lowest reward of the run so far; 0 if none was negative.
        """
        rewards = {e.task_id: e.reward for e in episodes if e.reward is not None}
        trains = any(rule.target.selected for rule in routing.rules)
        calls = (policy_calls(e, routing) if trains else len(e.recorded_calls) for e in episodes)
        return cls(
            step=step,
            rewards=rewards,
            unscored=len(episodes) - len(rewards),
            failed=sum(map(app_failed, episodes)),
            temperatures=_temperatures(episodes, routing),
            weights=weights,
            clusters=dict(clusters or {}),
            policy_calls=sum(calls),
            silent=sum(trains and is_silent(e, routing) for e in episodes),
            dimensions=dimension_means(episodes),
            failures=[e.task_id for e in episodes if e.reward_source == "failure"],
            failures_scored=[e.task_id for e in episodes if failed_with_reward(e)],
            failure_reward=failure_reward,
            lowest_reward=lowest_reward,
            own_text=sum(
                any(s.attributes.get(c.PROMPT_REASON) in OTHER_TEXTS for s in episode.spans)
                for episode in episodes
            ),
        )

    def restated(self, failure_reward: float | None) -> Evaluation:
        """Return the evaluation with the failure reward of a later one, so that both compare.

        Args:
            failure_reward: reward of tasks whose app failed; None leaves the evaluation unchanged.
        """
        if not self.failures or failure_reward is None:
            return self
        rewards = self.rewards | dict.fromkeys(self.failures, failure_reward)
        return msgspec.structs.replace(self, rewards=rewards, failure_reward=failure_reward)

    @property
    def mean(self) -> float:
        """The mean reward of the scored tasks; NaN if there are none."""
        return fmean(self.rewards.values()) if self.rewards else math.nan

    @property
    def mean_without_failures(self) -> float:
        """The mean reward of the tasks on which the app did not fail; NaN if there are none."""
        rewards = self.rewards.keys() - self._failures_counted
        return fmean(self.rewards[task] for task in rewards) if rewards else math.nan

    @property
    def _failures_counted(self) -> list[str]:
        """Ids of the tasks on which the app failed and whose reward counts in the mean."""
        return [*self.failures, *self.failures_scored]

    @property
    def interval(self) -> Interval:
        """The mean reward with its 95 % confidence interval, which takes clusters into account."""
        return clustered_interval(self.rewards, self.clusters, self.lowest_reward)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of tasks that are unscored, failed or not comparable; the keys describe them."""
        counts = {"unscored": self.unscored, "failed": self.failed, SILENT: self.silent}
        return counts | {OWN_TEXT: self.own_text}

    def metrics(self) -> dict[str, Json]:
        """Return the metrics of the evaluation for `metrics.jsonl`.

        They are the mean reward with its interval, the number of the policies' calls, and the
        numbers of tasks that are unscored, failed or without a call of the policy.
        """
        without = self.mean_without_failures if self._failures_counted else math.nan
        others = None if math.isnan(without) else without
        more = {"weights": self.weights, "mean_without_failures": others}
        more |= {"failed_scored": len(self.failures_scored) or None}
        more |= {"policy_calls": self.policy_calls, "silent": self.silent or None}
        more |= {"own_text": self.own_text or None}
        counts = {"unscored": self.unscored, "failed": self.failed, **self.dimensions}
        shown = {name: value for name, value in more.items() if value is not None}
        return {**msgspec.to_builtins(self.interval), **counts, **shown}

    def text(self, metric: str, split: str = "held-out") -> str:
        """Describe the evaluation in one line.

        Args:
            metric: name of the reward.
            split: name of the split of the tasks.
        """
        own = counted({"with a reward of their own; ": len(self.failures_scored)})
        without = f" ({own}{self.mean_without_failures:.3f} without these)"
        shown = without if self._failures_counted and "nan" not in without else ""
        counts = counted({f"{k}{shown * (k == 'failed')}": n for k, n in self.counts.items()})
        counts = (f", {counts}" if counts else "") + named_means(self.dimensions)
        counts += self._sampling_text()
        of = "" if self.weights is None else f" with the weights of step {self.weights}"
        return f"step {self.step}: {split} {metric}{of} {self.interval}{counts}"

    def _sampling_text(self) -> str:
        """Describe the sampling temperatures; empty if no call was recorded."""
        agents = {
            agent: " and ".join(_DEFAULT if value is None else f"{value:g}" for value in values)
            for agent, values in self.temperatures.items()
        }
        distinct = set(agents.values())
        if distinct == {_DEFAULT}:
            return f"; sampled at {_DEFAULT} temperature"
        if len(distinct) == 1:
            return f"; sampled at temperature {distinct.pop()}"
        named = ", ".join(f"{agent} at {value}" for agent, value in agents.items())
        return f"; sampled at temperature: {named}" if named else ""


_DEFAULT: Final = "its endpoint's own"
_UNDELIVERED: Final = ":undelivered"
SILENT: Final = "without a call of the policy"
"""Description of rollouts that asked the policy nothing, after their number."""
OWN_TEXT: Final = "without a learned text, because the app's own is not the one of the search"
"""Description of rollouts in which the app's text was not replaced, after their number."""


_ELSEWHERE: Final = (None, Route.APP, Route.ENDPOINT)
"""Routes of calls that were sampled without a token record. On the others, a call without one was
refused, or ended before it was sampled."""


def _temperatures(episodes: Sequence[Episode], routing: Routing) -> dict[str, list[float | None]]:
    found: dict[str, set[float | None]] = defaultdict(set)
    for call in (call for episode in episodes for call in episode.calls):
        if call.record is not None:
            found[call.agent_path].add(call.record.sampling.temperature)
        elif call.span is not None and call.refused is None and call.route in _ELSEWHERE:
            endpoint = routing.target(call.agent_path).endpoint
            override = {} if endpoint is None else endpoint.sampling  # replaces the app's sampling
            value = override.get("temperature", call.span.attributes.get(c.REQUEST_TEMPERATURE))
            found[call.agent_path].add(float(value) if isinstance(value, int | float) else None)
    return {
        agent: sorted(values, key=lambda value: math.inf if value is None else value)
        for agent, values in sorted(found.items())
    }


class Outcomes(NamedTuple):
    """Counts of a run's training rollouts, including those before restarts."""

    rollouts: int = 0
    unscored: int = 0
    """Rollouts without a valid reward; they are neither trained nor part of a mean reward."""
    failed: int = 0
    """Rollouts on which the app failed, scored or not."""
    undelivered: int = 0
    """Calls of agents to train whose answers never reached the app; they are not trained."""
    silent: int = 0
    """Rollouts that the app finished without a call of a trained policy; they teach nothing."""
    rejected: int = 0
    """Other calls of agents to train in scored rollouts that are not trained."""
    lost_attempts: int = 0
    """Attempts whose runner or endpoint was lost, and that were run again."""

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, Any]]) -> Outcomes:
        """Return the counts, summed over the training steps.

        Steps without the metrics `rollouts`, `scored` and `failed`, which a user's algorithm may
        lack, are left out.

        Args:
            metrics: lines of `metrics.jsonl`.
        """
        names = ("rollouts", "scored", "failed")
        train = [line for line in metrics if line["kind"] == "train"]
        lines = [line for line in train if all(is_number(line.get(name)) for name in names)]
        rollouts, scored, failed = (int(sum(line[name] for line in lines)) for name in names)
        items = [(key, value) for line in lines for key, value in line.items() if is_number(value)]
        calls = [(key, value) for key, value in items if key.startswith("calls/rejected:")]
        # counted elsewhere
        apart = (":unscored", ":replayed", ":target_kl", _UNDELIVERED)
        rejected = sum(v for k, v in calls if not k.endswith(apart))
        undelivered = sum(v for k, v in calls if k.endswith(_UNDELIVERED))
        silent, repeats = (sum(v for k, v in items if k == x) for x in ("silent", "lost_attempts"))
        more = map(int, (undelivered, silent, rejected, repeats))
        return cls(rollouts, rollouts - scored, failed, *more)

    @property
    def problems(self) -> str:
        """Numbers of unscored, failed and silent rollouts and of rejected calls as text.

        Numbers of 0 are left out, so the text may be empty.
        """
        counts = {"unscored": self.unscored, "failed": self.failed, SILENT: self.silent}
        calls = {"undelivered answers": self.undelivered, "rejected calls": self.rejected}
        calls |= {"lost attempts, run again": self.lost_attempts}
        return counted(counts | calls)

    def __str__(self) -> str:
        rollouts = plural(self.rollouts, "rollout")
        return f"of {rollouts} in training {self.problems}" if self.problems else ""


def mismatch_text(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return how much the probabilities of engine and learner differed in training, as text.

    Steps are weighted by their trained tokens.

    Empty if there was no importance weight or mask, which follow from an engine that computes in
    another way than the learner.

    Args:
        metrics: lines of `metrics.jsonl`.
    """
    names = ("truncated", "masked")
    means: dict[str, float] = {}
    for name in ("mean", *names):
        key = f"learner/engine_ratio_{name}"
        steps = [line for line in metrics if is_number(line.get(key))]
        sizes = [line.get("batch/trained_tokens") or 1 for line in steps]
        if steps:
            means[name] = fmean((line[key] for line in steps), weights=sizes)
    shares = [f"{100 * means[name]:.2g} % {name}" for name in names if name in means]
    if not shares:
        return ""
    ratio = f"differ by {means['mean']:.2g} nats a token, " if "mean" in means else ""
    return f"engine and learner {ratio}{', '.join(shares)}"


def counted(counts: Mapping[str, int]) -> str:
    """Return a text with the counts above 0, such as `2 unscored, 1 failed`."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The result of `Trainer.fit`."""

    folder: Path
    model: Path | None
    """Folder of the trained model, with a subfolder per policy if there are several; None without
    policies."""
    evaluations: tuple[Evaluation, ...]
    seconds: Mapping[str, float]
    """Part → CPU-seconds: `engine` and `learner` in training, `engine_evaluation` and
    `learner_evaluation` in evaluations."""
    steps: int
    kept: Evaluation | None = None
    """With `keep="best"`, the evaluation on the selection split by which the step was chosen; else
    None. Its score is biased upwards, as the highest of several scores; the last of `evaluations`
    has the held-out reward of the same weights.
    """
    outcomes: Outcomes = field(default_factory=Outcomes)
    """Counts of the training rollouts."""
    mismatch: str = ""
    """How much the probabilities of engine and learner differed in training, as text; empty if they
    were computed by the same code, or nothing was trained."""
    prompts: Mapping[str, LearnedPrompt] = field(default_factory=dict)
    """Name → learned prompt with its original text; empty if no prompt was learned."""

    @property
    def gain(self) -> Interval | None:
        """Mean change of the reward from the first to the last evaluation, paired by task.

        None if there are fewer than two evaluations, or no task was scored in both.
        """
        if len(self.evaluations) < 2:
            return None
        first, last = self.evaluations[0], self.evaluations[-1]
        gain = paired_gain(first.rewards, last.rewards, last.clusters, last.lowest_reward)
        return gain if gain.n else None

    def summary(self, metric: str = "reward") -> str:
        """Describe the result in one line.

        The line has the mean rewards of the first and the last evaluation, the confidence interval
        of the gain, and the numbers of tasks and rollouts that are unscored or failed. Means and
        gain are over the tasks that were scored in both evaluations. Failed tasks count with
        `failure_reward`; the means without failed tasks follow. If no task was scored in both, the
        line has each evaluation's own mean.

        Args:
            metric: name of the reward.
        """
        of = "" if self.kept is None else f", keeping step {self.kept.step}"
        trained = "".join(f"; {text}" for text in (str(self.outcomes), self.mismatch) if text)
        gain, ends = self.gain, self.evaluations[:1] + self.evaluations[1:][-1:]
        if gain is None:
            each = " -> ".join(f"{one.mean:.2f} (n={len(one.rewards)})" for one in ends)
            both = f"; held-out {metric}: {each}, no task scored in both" if ends[1:] else ""
            return f"trained for {self.steps} steps{of}{trained}{both}: {self.folder}"
        tasks = ends[0].rewards.keys() & ends[1].rewards.keys()
        means = [math.fsum(one.rewards[task] for task in tasks) / gain.n for one in ends]
        bounds = f"95% CI of the gain {gain.low:.2f}..{gain.high:.2f}"
        return (
            f"held-out {metric}: {means[0]:.2f} -> {means[1]:.2f} ({gain.size}, "
            f"{bounds if gain.is_known else 'no CI of the gain'}){_problems(*ends)}{of}{trained}"
        )


def _problems(first: Evaluation, last: Evaluation) -> str:
    """Describe how many held-out tasks were unscored, failed or without a call of the policy.

    The result is empty if there are none.
    """
    before, after = first.counts, last.counts
    counts = {name: f"{name} {before[name]} -> {after[name]}" for name in before}
    means = [f"{each.mean_without_failures:.2f}".replace("nan", "none") for each in (first, last)]
    if (first._failures_counted or last._failures_counted) and set(means) != {"none"}:
        counts["failed"] += f" ({' -> '.join(means)} without these)"
    shown = [text for name, text in counts.items() if before[name] or after[name]]
    return f"; held out: {', '.join(shown)}" if shown else ""
