"""Advantages: from observations to a baseline and a scale per observation, in float64.

An *observation* is what one unit contributes to the statistics: one number per rollout (unit
`rollout`), or one per rollout and agent that acted in it (unit `agent`: the agent-wise statistics
of Dr. MAS, arXiv 2602.08847, with one observation per rollout however often the agent was called).
How many calls, rows or tokens a rollout has does not matter.

An observation's value is the rollout's *return*: its final reward and, where the credit rule pays
for them, all rewards on its calls, undiscounted and without potentials. Returns alone decide which
groups say nothing, and on which scale the others speak; with terminal credit they are the baseline
too. Every other credit rule compares calls with calls (`lightspan.lightning.baselines`).

| estimator | baseline | scale | population |
|---|---|---|---|
| `grpo` (2402.03300) | group mean | group standard deviation, ddof 1 | group |
| `dr_grpo` (2503.20783) | group mean | 1 | group |
| `rloo` (2402.14740) | mean of the group's others | 1 | group |
| `reinforce++` (2501.03262) | batch mean | batch standard deviation, ddof 1 | batch |
| `reinforce++_baseline` (2501.03262) | group mean | batch standard deviation, centred | both |
| `ppo` (1707.06347) | what a critic expected | batch standard deviation, ddof 1 | batch |

With unit `agent`, group and batch are each split by agent. REINFORCE++ as published whitens over
tokens, which makes long rollouts count more; `reinforce_pp` takes such weights, the batch gives
none.

Where the statistics say nothing, the advantage is exactly 0 and a `ZeroReason` says why: a group of
one, values that are identical within a relative 1e-9, an unscored value (None, NaN, infinity:
excluded from every statistic). With `ppo`, which compares with no other rollout, only the last; its
scale is then 1. There is no epsilon in a denominator.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, Literal, NamedTuple

import msgspec

from lightspan.errors import ConfigError, RewardError

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "ppo"]
Unit = Literal["rollout", "agent"]

OF_THE_BATCH: Final[frozenset[str]] = frozenset({"reinforce++", "ppo"})
"""Estimators that compare with the whole batch, not with the group."""

RELATIVE_TOLERANCE: Final = 1e-9
ABSOLUTE_TOLERANCE: Final = 1e-12
"""Rewards are sums of floats: values that should be equal differ by rounding, and divided by their
own tiny spread they would have advantages as large as any."""


class ZeroReason(StrEnum):
    """Why an advantage is zero by definition."""

    GROUP_OF_ONE = "group_of_one"
    IDENTICAL = "identical"
    UNSCORED = "unscored"


class BaselineScale(msgspec.Struct, frozen=True):
    """What one observation is measured against."""

    baseline: float
    scale: float
    size: int
    """Scored observations in the population."""
    zero: ZeroReason | None = None

    def advantage(self, credit: float) -> float:
        return 0.0 if self.zero is not None else (credit - self.baseline) / self.scale


class Observation(msgspec.Struct, frozen=True):
    """What one unit contributes to the statistics."""

    rollout_id: str
    group_id: str
    value: float | None
    agent: str = ""
    """The agent's path with unit `agent`, else empty."""


# --- one population ---------------------------------------------------------------------------


def grpo(values: Sequence[float | None]) -> list[BaselineScale]:
    """A group's (R - mean) / std, ddof 1 (GRPO, arXiv 2402.03300).

    Example:
        >>> [round(norm.advantage(1.0), 3) for norm in grpo([1, 0, 0, 0, 0, 0, 0, 0])][0]
        2.475
    """
    return _fill(values, lambda scored: [(_mean(scored), spread(scored))] * len(scored))


def dr_grpo(values: Sequence[float | None]) -> list[BaselineScale]:
    """A group's R - mean (Dr. GRPO, arXiv 2503.20783)."""
    return _fill(values, lambda scored: [(_mean(scored), 1.0)] * len(scored))


def rloo(values: Sequence[float | None]) -> list[BaselineScale]:
    """R - mean of the others in the group (RLOO, arXiv 2402.14740): Dr. GRPO times G / (G - 1)."""

    def others(scored: list[float]) -> list[tuple[float, float]]:
        total = math.fsum(scored)
        return [((total - value) / (len(scored) - 1), 1.0) for value in scored]

    return _fill(values, others)


def reinforce_pp(
    values: Sequence[float | None], weights: Sequence[float] | None = None
) -> list[BaselineScale]:
    """A batch's (R - mean) / std, ddof 1 (REINFORCE++, arXiv 2501.03262).

    Args:
        weights: how often each value counts, such as once per token. None: once.
    """
    if weights is None:
        return grpo(values)
    kept = [w for w, value in zip(weights, map(usable, values), strict=True) if value is not None]

    def weighted(scored: list[float]) -> list[tuple[float, float]]:
        total = math.fsum(kept)
        mean = math.fsum(w * v for w, v in zip(kept, scored, strict=True)) / total
        squares = math.fsum(w * (v - mean) ** 2 for w, v in zip(kept, scored, strict=True))
        return [(mean, math.sqrt(squares / (total - 1)))] * len(scored)

    return _fill(values, weighted)


def ppo(values: Sequence[float | None]) -> list[BaselineScale]:
    """A batch's mean, and its standard deviation (ddof 1) if it has one, else 1: what a critic's
    advantages are scaled by."""
    scored = [value for value in map(usable, values) if value is not None]
    known = BaselineScale(_mean(scored) if scored else 0.0, 1.0, len(scored))
    if _why_zero(scored) is None:
        known = msgspec.structs.replace(known, scale=spread(scored))
    missing = BaselineScale(0.0, 1.0, len(scored), ZeroReason.UNSCORED)
    return [missing if usable(value) is None else known for value in values]


def reinforce_pp_baseline(groups: Sequence[Sequence[float | None]]) -> list[list[BaselineScale]]:
    """(R - group mean) / std of that over the batch (the baseline form of REINFORCE++).

    Groups of one and groups of identical values count in the batch as the zeros that they are.
    """
    centred = [dr_grpo(group) for group in groups]
    differences = [
        norm.advantage(usable(value) or 0.0)
        for norms, group in zip(centred, groups, strict=True)
        for norm, value in zip(norms, group, strict=True)
        if norm.zero is not ZeroReason.UNSCORED
    ]
    squares = math.fsum(d * d for d in differences)
    scale = math.sqrt(squares / (len(differences) - 1)) if squares else 1.0
    return [
        [
            msgspec.structs.replace(norm, scale=scale) if norm.zero is None else norm
            for norm in norms
        ]
        for norms in centred
    ]


def usable(value: float | None) -> float | None:
    """float64, or None for what is unscored. True is 1.0.

    Raises:
        RewardError: a text, or anything else that is no number.
    """
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise RewardError(f"a reward must be a number, not {type(value).__name__}: {value!r}")
    return float(value) if math.isfinite(value) else None


def identical(values: Sequence[float]) -> bool:
    """Whether values differ by no more than rounding: 1e-9 of the largest magnitude (or 1e-12)."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    return high - low <= max(RELATIVE_TOLERANCE * largest, ABSOLUTE_TOLERANCE)


def _fill(
    values: Sequence[float | None], rule: Callable[[list[float]], list[tuple[float, float]]]
) -> list[BaselineScale]:
    """The rule's (baseline, scale) for the scored values, zeros where there is nothing to say."""
    scored = [value for value in map(usable, values) if value is not None]
    size, zero = len(scored), _why_zero(scored)
    if zero is None:
        norms = iter([BaselineScale(baseline, scale, size) for baseline, scale in rule(scored)])
    else:
        norms = iter([BaselineScale(_mean(scored), 1.0, size, zero) for _ in scored])
    return [
        BaselineScale(0.0, 1.0, size, ZeroReason.UNSCORED) if usable(value) is None else next(norms)
        for value in values
    ]


def _why_zero(scored: Sequence[float]) -> ZeroReason | None:
    """Why these values of a population teach nothing; None if they do."""
    if not scored:
        return ZeroReason.UNSCORED
    if len(scored) == 1:
        return ZeroReason.GROUP_OF_ONE
    return ZeroReason.IDENTICAL if identical(scored) else None


def _mean(values: Sequence[float]) -> float:
    """The sum is exact, so that the order of the values does not matter."""
    return math.fsum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """The standard deviation, ddof 1, of values that differ. Of deviations as parts of the widest,
    so that the squares of very large or small rewards neither overflow nor vanish."""
    mean = _mean(values)
    widest = max(abs(value - mean) for value in values)
    squares = math.fsum(((value - mean) / widest) ** 2 for value in values)
    return widest * math.sqrt(squares / (len(values) - 1))


# --- a batch of groups ------------------------------------------------------------------------


def normalise(estimator: Estimator, observations: Sequence[Observation]) -> list[BaselineScale]:
    """What each observation of a batch is measured against.

    Raises:
        ConfigError: an unknown estimator.
    """
    check_estimator(estimator)
    if estimator == "reinforce++_baseline":
        return _by(observations, lambda o: o.agent, _against_groups)
    if estimator == "reinforce++":
        return _by(observations, lambda o: o.agent, lambda batch: reinforce_pp(_values(batch)))
    if estimator == "ppo":
        return _by(observations, lambda o: o.agent, lambda batch: ppo(_values(batch)))
    rule = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}[estimator]
    return _by(observations, lambda o: (o.group_id, o.agent), lambda group: rule(_values(group)))


def check_estimator(estimator: str) -> None:
    """Raise `ConfigError` unless it is one of `Estimator`."""
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator={estimator!r}: use one of {', '.join(ESTIMATORS)}")


ESTIMATORS: Final[tuple[Estimator, ...]] = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce++",
    "reinforce++_baseline",
    "ppo",
)


def _by(
    observations: Sequence[Observation],
    key: Callable[[Observation], Hashable],
    rule: Callable[[Sequence[Observation]], list[BaselineScale]],
) -> list[BaselineScale]:
    """The rule, applied to each population by itself."""
    norms: dict[int, BaselineScale] = {}
    for places in _places(observations, key).values():
        population = [observations[place] for place in places]
        norms.update(zip(places, rule(population), strict=True))
    return [norms[place] for place in range(len(observations))]


def _against_groups(batch: Sequence[Observation]) -> list[BaselineScale]:
    """`reinforce_pp_baseline` of a batch whose groups may stand in any order."""
    groups = _places(batch, lambda o: o.group_id).values()
    by_group = reinforce_pp_baseline([_values([batch[p] for p in places]) for places in groups])
    norms: dict[int, BaselineScale] = {}
    for places, group in zip(groups, by_group, strict=True):
        norms.update(zip(places, group, strict=True))
    return [norms[place] for place in range(len(batch))]


def _values(observations: Sequence[Observation]) -> list[float | None]:
    return [observation.value for observation in observations]


def _places(
    observations: Sequence[Observation], key: Callable[[Observation], Hashable]
) -> dict[Hashable, list[int]]:
    """Population → the places of its observations."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, observation in enumerate(observations):
        places[key(observation)].append(place)
    return places


# --- groups that teach nothing ----------------------------------------------------------------


def groups_without_variance(rewards: Mapping[str, Sequence[float | None]]) -> dict[str, ZeroReason]:
    """The groups whose advantages would all be zero, and why (rewards by group id)."""
    reasons: dict[str, ZeroReason] = {}
    for group_id, values in rewards.items():
        zero = _why_zero([value for value in map(usable, values) if value is not None])
        if zero is not None:
            reasons[group_id] = zero
    return reasons


class Resampling(NamedTuple):
    """What dynamic sampling would do (DAPO, arXiv 2503.14476)."""

    again: list[str]
    """Groups to replace by fresh ones."""
    exhausted: list[str]
    """Groups without variance that have used up their tries: they stay, with advantage 0."""


def needs_resampling(
    rewards: Mapping[str, Sequence[float | None]], tries: Mapping[str, int], max_tries: int
) -> Resampling:
    """The groups without variance that should be sampled again. Groups that have used up their
    tries stay as they are: a hard task must not stop a training.

    Args:
        rewards: group id → the rewards of its rollouts.
        tries: group id → how often it was sampled so far; 1 where it is not named.
        max_tries: how often it may be sampled; 1 never samples again.
    """
    idle = list(groups_without_variance(rewards))
    again = [group_id for group_id in idle if tries.get(group_id, 1) < max_tries]
    return Resampling(again, [group_id for group_id in idle if group_id not in set(again)])


# --- why --------------------------------------------------------------------------------------


class CreditTerm(msgspec.Struct, frozen=True):
    """A further part of an advantage: weight · (credit - baseline) / scale."""

    name: str
    credit: float
    baseline: float
    scale: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.weight * (self.credit - self.baseline) / self.scale

    def __str__(self) -> str:
        weight = "" if self.weight == 1 else f"{self.weight:g} · "
        return f" + {weight}({self.credit:g} - {self.baseline:g}) / {self.scale:g} ({self.name})"


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a transition has its advantage and weight. `advantage` is what the learner used."""

    rollout_id: str
    group_id: str
    agent_path: str
    estimator: str
    unit: str
    credit_rule: str
    weighting: str
    credit: float
    """What the credit rule gave this call, with `shaping`."""
    shaping: float | None = None
    """The part of `credit` that AIR added; None without AIR."""
    penalty: float | None = None
    """The part of `credit` that its length cost; None without `Overlong`."""
    expected: float | None = None
    """What the critic said of it; None without one."""
    value: float
    """The rollout's return, which its unit contributed to the statistics."""
    baseline: float
    scale: float
    size: int
    """Observations in the statistics."""
    zero: ZeroReason | None
    turn: int = 0
    others: int = 0
    """Calls of other rollouts (with `at_grpo` of its own too) that the baseline is made of."""
    against: str = "rollouts"
    """Where these are; with "rollouts" the baseline is made of returns."""
    compared: float | None = None
    """What is measured against the baseline; None: `credit`."""
    terms: tuple[CreditTerm, ...] = ()
    """What is added, by rules whose advantage has several parts."""
    tokens: int
    """Trained tokens of the call."""
    token_weight: float
    """Weight of each of them in the loss."""
    share: float
    """Part of its rollout's weight (for its policy) that this call holds."""

    @property
    def advantage(self) -> float:
        plain = BaselineScale(self.baseline, self.scale, self.size, self.zero).advantage(
            self._compared
        )
        return plain + math.fsum(term.value for term in self.terms) if self.terms else plain

    @property
    def _compared(self) -> float:
        return self.credit if self.compared is None else self.compared

    def __str__(self) -> str:
        if self.zero is None:
            formula = f"({self._compared:g} - {self.baseline:g}) / {self.scale:g}"
        else:
            formula = str(self.zero)
        formula += "".join(map(str, self.terms))
        compared = ""
        if self.against != "rollouts":
            compared = f", turn {self.turn}, others {self.against}: {self.others}"
        if self.expected is not None:
            compared = f", turn {self.turn}, the critic expected {self.expected:g}"
        shaped = "" if self.shaping is None else f", AIR {self.shaping:+g}"
        shaped += f", length {self.penalty:+g}" if self.penalty else ""
        return (
            f"advantage {self.advantage:+.6g} = {formula}; {self.estimator} over {self.size} "
            f"{self.unit}s (group {self.group_id}, this one {self.value:g}); credit "
            f"{self.credit:g} ({self.credit_rule}{shaped}){compared}; share {self.share:.1%} of "
            f"the rollout: {self.tokens} tokens of weight {self.token_weight:.6g} "
            f"({self.weighting})"
        )


def count_zeros(norms: Iterable[BaselineScale]) -> dict[str, int]:
    """How many observations have advantage zero by definition, by reason."""
    return dict(Counter(f"zero:{norm.zero}" for norm in norms if norm.zero is not None))
