"""Symptoms: what the history of a run says of a training that goes wrong.

A `Watch` is given the lines of `metrics.jsonl` one by one and says what a person has to hear. What
it says follows from the lines alone: a run that is resumed, and `lightspan inspect`, read the same
lines again and come to the same.

Each test looks after every step, and may look back at every earlier one. So that of runs in which
nothing happens one of a hundred at most hears of a fall, a look at step t asks for a probability
below 0.01 / t^2.5. The exponent was found by simulation: with it a fall is heard of in
0.4 % of runs of 20 steps and 0.7 % of runs of 200 or 1,000, with 2 in 0.9 %, 3 % and 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.progress import many
from lightspan.training.results import Evaluation

Line = Mapping[str, Any]

FALSE_ALARM: Final = 0.01
"""Of a test, per run in which nothing happens."""
LOOKS_EXPONENT: Final = 2.5
BLOCKS: Final = (2, 4, 8, 16, 32, 64)
"""Steps that are compared with as many earlier ones."""
IDLE: Final = 0.2
"""Share of groups that vary: where none of the latest did, it must be smaller than this."""
LEAST_UPDATES: Final = 10
"""Steps with an update, before it is said that the policy does not move."""
MOVED: Final = 0.05
"""Share of the rollouts that training must be able to change."""
COLLAPSED: Final = 0.1
"""Of the entropy at the start."""
ENTROPY_STEPS: Final = 4
"""Updates whose entropies are averaged: they are of the few tokens that were learned from."""
LARGEST: Final = 1e100
"""Of a figure: the squares of larger ones are no numbers."""
WORSE: Final = 1.5
"""How many times as bad a symptom has to be to be said again."""


_REWARDED: Final = frozenset({"reward", "reward_se", "batch/groups"})
_MOVED: Final = frozenset({"learner/approx_kl", "batch/scored", "batch/trained_tokens"})


class Symptom(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong."""

    name: str
    step: int
    text: str
    """With the figures that it follows from, and the settings to change."""
    severity: float = 1.0
    """To tell whether it got worse."""


class Block(NamedTuple):
    """Consecutive training steps."""

    first: int
    last: int
    mean: float
    variance: float
    """Of a group's mean reward."""
    groups: int

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Block:
        """Those of these lines, which have `reward` and `reward_se`."""
        count = len(lines)
        return cls(
            lines[0]["step"],
            lines[-1]["step"],
            math.fsum(line["reward"] for line in lines) / count,
            math.fsum(line["reward_se"] ** 2 * line["batch/groups"] for line in lines) / count,
            sum(int(line["batch/groups"]) for line in lines),
        )

    def __str__(self) -> str:
        return f"{self.mean:.3f} in steps {self.first} to {self.last}"


class Watch:
    """Looks at a run as it goes on.

    Args:
        planned: steps of the run.
    """

    def __init__(self, planned: int) -> None:
        self._planned = planned
        self._train: list[Line] = []
        self._rewarded: list[Line] = []
        """Of those, the ones whose reward has a known error."""
        self._updates: list[Line] = []
        """Of those, the ones of which it is known how far they moved the policy."""
        self._evaluations: list[Evaluation] = []
        self._said: dict[str, float] = {}

    def step(self, line: Line) -> list[Symptom]:
        """What a line of a training step shows that was not said yet, or less bad."""
        # an algorithm of one's own may say anything: what is no figure is not known
        line = {key: value for key, value in line.items() if _is_figure(value)}
        self._train.append(line)
        if line.keys() >= _REWARDED and line["batch/groups"] >= 1:
            self._rewarded.append(line)
        if line.keys() >= _MOVED:
            self._updates.append(line)
        return list(self._fresh(self._of_step()))

    def evaluated(self, evaluation: Evaluation) -> list[Symptom]:
        """The same of an evaluation."""
        self._evaluations.append(evaluation)
        found = validation_falls(self._evaluations)
        return list(self._fresh([found] if found else []))

    def read(self, metrics: Sequence[Line], evaluations: Sequence[Evaluation]) -> list[Symptom]:
        """What was said of a run so far.

        Args:
            metrics: the lines of `metrics.jsonl`.
            evaluations: the held-out ones, as far as they are kept.
        """
        by_step = {found.step: found for found in evaluations}
        said: list[Symptom] = []
        for line in metrics:
            if line["kind"] == "train":
                said += self.step(line)
            elif line["kind"] == "eval" and line["step"] in by_step:
                said += self.evaluated(by_step[line["step"]])
        return said

    def _of_step(self) -> Iterator[Symptom]:
        tests: tuple[Callable[[], Symptom | None], ...] = (
            lambda: reward_falls(self._rewarded, self._train, self._updates),
            # of a policy that has collapsed all rollouts are alike
            lambda: None if "reward_falls" in self._said else no_group_varies(self._train),
            lambda: entropy_collapses(self._train, self._rewarded),
            lambda: policy_stays(self._updates, self._rewarded, self._planned),
        )
        return (found for test in tests if (found := test()) is not None)

    def _fresh(self, found: Iterable[Symptom]) -> Iterator[Symptom]:
        for symptom in found:
            if symptom.severity >= WORSE * self._said.get(symptom.name, 0.0):
                self._said[symptom.name] = symptom.severity
                yield symptom


# --- the tests ------------------------------------------------------------------------------
def reward_falls(
    rewarded: Sequence[Line], train: Sequence[Line], updates: Sequence[Line]
) -> Symptom | None:
    """Whether the latest steps' reward is below that of earlier ones by more than noise: that of
    sampling, and of steps having other tasks.

    Args:
        rewarded: lines of training steps with `reward`, `reward_se` and `batch/groups`.
        train: all of them.
        updates: those of which it is known how far they moved the policy.
    """
    steps = len(rewarded)
    for size in (size for size in BLOCKS if 2 * size <= steps):
        latest = Block.of(rewarded[-size:])
        best = _best_block(rewarded[:-size], size)
        if _probability(best, latest) < _level(steps):
            fall = best.mean - latest.mean
            return Symptom(
                name="reward_falls",
                step=train[-1]["step"],
                text=(
                    f"the training reward is falling: {best}, {latest} (standard error of the "
                    f"difference {_error(best, latest):.3f}{_movement(updates)}). "
                    f"Lower learning_rate{_rate(train)}, or hold the policy near its start with "
                    "loss=PolicyLoss(kl=0.02)"
                ),
                severity=fall,
            )
    return None


def validation_falls(evaluations: Sequence[Evaluation]) -> Symptom | None:
    """Whether the latest evaluation is below the best one, on the tasks that both scored, by more
    than chance."""
    if len(evaluations) < 2:
        return None
    latest = evaluations[-1]
    best = max(evaluations[:-1], key=_mean)
    falls = {
        task: reward - latest.rewards[task]
        for task, reward in best.rewards.items()
        if task in latest.rewards
    }
    of_cluster: dict[str, list[float]] = {}
    for task, fall in falls.items():
        of_cluster.setdefault(latest.clusters.get(task, task), []).append(fall)
    groups = list(of_cluster.values())
    if len(groups) < 2:
        return None
    mean = math.fsum(falls.values()) / len(falls)
    # of the mean over clusters (of one task each: the textbook's)
    squares = math.fsum(math.fsum(fall - mean for fall in group) ** 2 for group in groups)
    error = math.sqrt(squares * len(groups) / (len(groups) - 1)) / len(falls)
    # where every task but a few scored the same, signs alone bound how unlikely it is
    least = 0.5 ** sum(any(group) for group in groups)
    probability = max(least, _tail(mean, error, len(groups) - 1))
    if probability >= _level(len(evaluations)):
        return None
    return Symptom(
        name="validation_falls",
        step=latest.step,
        text=(
            f"the held-out reward has fallen since step {best.step}: by {mean:.3f} "
            f"(95% CI {mean - 1.96 * error:.3f}..{mean + 1.96 * error:.3f}, n={len(falls)}). Lower "
            "learning_rate, train for fewer steps, or keep the best step by tasks of its own: "
            'Trainer(keep="best"), fit(…, selection=…)'
        ),
        severity=mean,
    )


def no_group_varies(train: Sequence[Line]) -> Symptom | None:
    """Whether no group's rewards differed in the latest steps, so that nothing was learned."""
    latest = list(takewhile(_is_idle, reversed(train)))
    groups = sum(int(line["batch/groups"]) for line in latest)
    if (1 - IDLE) ** groups >= _level(max(1, len(train))):
        return None
    rewards = [line["reward"] for line in latest if "reward" in line]
    shown = f" (mean {math.fsum(rewards) / len(rewards):.3f})" if rewards else ""
    return Symptom(
        name="no_group_varies",
        step=train[-1]["step"],
        text=(
            f"no group varied in the latest {many(len(latest), 'step')}: in each of {groups} the "
            f"rollouts had equal rewards{shown}, so there was nothing to learn from. Give tasks "
            "that are neither solved nor failed each time, a reward that pays for part of a "
            "solution, a larger group_size, a higher temperature, or resample=3"
        ),
    )


def entropy_collapses(train: Sequence[Line], rewarded: Sequence[Line]) -> Symptom | None:
    """Whether the policy has become sure of its answers without the reward having risen."""
    values = [line["learner/entropy"] for line in train if "learner/entropy" in line]
    size = ENTROPY_STEPS
    if len(values) < 2 * size:
        return None
    first, latest = (math.fsum(part) / size for part in (values[:size], values[-size:]))
    if latest >= COLLAPSED * first or _has_risen(rewarded):
        return None
    return Symptom(
        name="entropy_collapses",
        step=train[-1]["step"],
        text=(
            f"the policy's entropy has fallen from {first:.3g} to {latest:.3g} per token, and the "
            "reward has not risen with it: the policy answers more and more alike. Lower "
            f"learning_rate{_rate(train)}, or pay for variety with loss=PolicyLoss(entropy=0.01)"
        ),
        severity=math.log(max(first, 1e-12) / max(latest, 1e-12)),
    )


def policy_stays(updates: Sequence[Line], rewarded: Sequence[Line], planned: int) -> Symptom | None:
    """Whether the updates are too small for the whole run to change what the app does."""
    if len(updates) < LEAST_UPDATES or _rate_rises(updates) or _has_risen(rewarded):
        return None
    shares = [_changed_share(line) for line in updates]
    share = planned * math.fsum(shares) / len(shares)
    if share >= MOVED:
        return None
    return Symptom(
        name="policy_stays",
        step=updates[-1]["step"],
        text=(
            f"the policy hardly moves: at this rate all {many(planned, 'step')} together change at "
            f"most {100 * share:.2g} % of the rollouts (approx_kl {_mean_of(updates):.2g} per "
            f"token and step). Raise learning_rate{_rate(updates)}: tenfold at first"
        ),
    )


# --- figures --------------------------------------------------------------------------------
def _level(looks: int) -> float:
    """The probability that a look has to be below."""
    return FALSE_ALARM / math.pow(looks, LOOKS_EXPONENT)


def _best_block(lines: Sequence[Line], size: int) -> Block:
    """The consecutive lines with the highest reward."""
    rewards = [line["reward"] for line in lines]
    total = best = math.fsum(rewards[:size])
    start = 0
    for end in range(size, len(rewards)):
        total += rewards[end] - rewards[end - size]
        if total > best:
            best, start = total, end - size + 1
    return Block.of(lines[start : start + size])


def _error(first: Block, second: Block) -> float:
    """The standard error of the difference of two blocks' means."""
    return math.sqrt(_pooled(first, second) * (1 / first.groups + 1 / second.groups))


def _probability(high: Block, low: Block) -> float:
    """How likely so large a difference is where there is none."""
    groups = high.groups + low.groups
    freedom = groups - (high.last - high.first + 1) - (low.last - low.first + 1)
    if freedom < 1:
        return 1.0
    # the least probability that so few groups can show, however far apart they are: one way to
    # choose the low ones of all (by logarithms, since of many groups there are too many ways)
    log_ways = math.lgamma(groups + 1) - math.lgamma(high.groups + 1) - math.lgamma(low.groups + 1)
    least = math.exp(min(0.0, -log_ways))
    return max(least, _tail(high.mean - low.mean, _error(high, low), freedom))


def _tail(difference: float, error: float, freedom: int) -> float:
    """The probability that Student's t is above a difference in units of its error, by Wallace's
    approximation (1959)."""
    if difference <= 0:
        return 1.0
    if error == 0:
        return 0.0
    square = min(difference / error, LARGEST) ** 2
    normal = (
        (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(square / freedom))
    )
    return 0.5 * math.erfc(normal / math.sqrt(2))


def _pooled(first: Block, second: Block) -> float:
    """The variance of a group's mean reward, of both: alone, that of steps in which every rollout
    failed would be nothing."""
    groups = first.groups + second.groups
    return (first.variance * first.groups + second.variance * second.groups) / groups


def _first_and_latest(rewarded: Sequence[Line]) -> tuple[Block, Block]:
    """The first and the last quarter."""
    size = max(1, len(rewarded) // 4)
    return Block.of(rewarded[:size]), Block.of(rewarded[-size:])


def _has_risen(rewarded: Sequence[Line]) -> bool:
    """Whether the reward is more likely to have risen than not to have."""
    if len(rewarded) < 2 * BLOCKS[0]:
        return False
    first, latest = _first_and_latest(rewarded)
    return _probability(latest, first) < 0.05


def _varying(line: Line) -> float | None:
    """The share of a step's groups whose rewards differ; None if it is not known."""
    groups = line.get("batch/groups")
    if groups is None or groups < 1:
        return None
    idle = sum(value for key, value in line.items() if key.startswith("batch/groups:"))
    return 1 - float(idle) / float(groups)


def _is_idle(line: Line) -> bool:
    """Whether a step's rewards taught nothing; an estimator without groups may have learned."""
    taught = line.get("batch/scored", 0) - line.get("batch/zero_advantage_rollouts", 0)
    return _varying(line) == 0 and bool(taught <= 0)


def _changed_share(line: Line) -> float:
    """The share of rollouts that a step can have changed, at most. The KL divergences of a
    rollout's tokens add up, and by Pinsker's inequality two distributions of rollouts differ by
    sqrt(KL / 2) at most; from step to step these differences add up at most."""
    rollouts = line["batch/scored"] - line.get("batch/zero_advantage_rollouts", 0)
    tokens = max(0.0, line["batch/trained_tokens"]) / max(1, rollouts)
    return math.sqrt(max(0.0, line["learner/approx_kl"]) * tokens / 2)


def _rate_rises(updates: Sequence[Line]) -> bool:
    """Whether the learning rate is still warming up."""
    before, now = (line.get("learner/learning_rate", 0.0) for line in updates[-2:])
    return bool(now > before)


def _rate(train: Sequence[Line]) -> str:
    """The learning rate, for people."""
    rates = [line["learner/learning_rate"] for line in train if "learner/learning_rate" in line]
    return f" (now {rates[-1]:.3g})" if rates else ""


def _movement(updates: Sequence[Line]) -> str:
    """How far the policy moves, for people."""
    return f"; approx_kl is {_mean_of(updates):.2g} per token and step" if updates else ""


def _mean_of(updates: Sequence[Line]) -> float:
    return math.fsum(line["learner/approx_kl"] for line in updates) / len(updates)


def _mean(evaluation: Evaluation) -> float:
    return evaluation.mean if math.isfinite(evaluation.mean) else -math.inf


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST
