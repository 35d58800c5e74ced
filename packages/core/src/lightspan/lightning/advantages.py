"""Advantages: a baseline and a scale for each observation, computed in float64.

An *observation* is one number from which means and deviations are computed. With unit `rollout`
there is one per rollout. With unit `agent` there is one per rollout and agent that acted in it,
however often the agent was called; these are the agent-wise statistics of Dr. MAS (arXiv
2602.08847). The number of calls, rows or tokens of a rollout does not matter.

The value of an observation is the rollout's *return*. That is its final reward plus, if the credit
rule uses them, all rewards on its calls, undiscounted and without potentials. Returns alone decide
which groups have no variance, and they set the scale of the other groups. With terminal credit they
set the baseline too. Every other credit rule compares calls with calls
(`lightspan.lightning.baselines`).

The credit of failed tries (`Episode.retried`) counts in deviations, so that a constant added to all
rewards cannot let one failed try outweigh the batch, and a group whose rollouts differ in nothing
else still learns from it. It counts in no mean of returns, because other agents of the rollout had
no part in it.

| estimator | baseline | scale | population |
|---|---|---|---|
| `grpo` (2402.03300) | group mean | group standard deviation, ddof 1 | group |
| `dr_grpo` (2503.20783) | group mean | 1 | group |
| `rloo` (2402.14740) | mean of the group's others | 1 | group |
| `reinforce++` (2501.03262) | batch mean | batch standard deviation, ddof 1 | batch |
| `reinforce++_baseline` (2501.03262) | group mean | batch standard deviation, centred | both |
| `ppo` (1707.06347) | the critic's value | batch standard deviation, ddof 1 | batch |

With unit `agent`, group and batch are each split by agent. REINFORCE++ as published whitens over
tokens, which gives long rollouts more influence; here each observation counts once.

An advantage is exactly 0, with a `ZeroReason`, in three cases:

- the group has one observation;
- the values of the group and its failed tries are identical but for rounding (`identical`);
- the value is unscored (None, NaN or infinity). It is then left out of every statistic.

`ppo` compares with no other rollout. So only the last case gives it a zero advantage, and in the
first two its scale is 1. No denominator has an epsilon.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from statistics import fmean
from typing import Final, Literal, TypeVar, get_args

import msgspec

from lightspan.schema.validation import check_choice

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "ppo"]
ESTIMATORS: Final[tuple[Estimator, ...]] = get_args(Estimator)
BATCH_ESTIMATORS: Final[frozenset[str]] = frozenset({"reinforce++", "ppo"})
"""Estimators whose population is the whole batch."""
Unit = Literal["rollout", "agent"]

T = TypeVar("T")


class ZeroReason(StrEnum):
    """Reason why an advantage is zero whatever the reward."""

    GROUP_OF_ONE = "group_of_one"
    IDENTICAL = "identical"
    UNSCORED = "unscored"


class BaselineScale(msgspec.Struct, frozen=True):
    """What is subtracted from a credit and what divides the result, to get an advantage."""

    baseline: float
    scale: float
    size: int
    """Number of scored observations in the population."""
    zero_reason: ZeroReason | None = None
    """Why the advantage is 0; None if it is computed."""

    def advantage(self, credit: float) -> float:
        """Return `(credit - baseline) / scale`, or 0 if there is a `zero_reason`."""
        return 0.0 if self.zero_reason is not None else (credit - self.baseline) / self.scale


class Observation(msgspec.Struct, frozen=True):
    """One of the numbers from which means and deviations are computed: a rollout's return.

    With unit `agent`, a rollout has one for each agent that acted in it.
    """

    rollout_id: str
    group_id: str
    value: float | None
    agent: str = ""
    """Agent path with unit `agent`; empty with unit `rollout`."""
    failed: float | None = None
    """Credit of failed tries in the rollout, which counts in no mean; None without any."""


# --- one population ---------------------------------------------------------------------------


def grpo(values: Sequence[float | None], failed: Sequence[float] = ()) -> list[BaselineScale]:
    """Return for each value the mean of all as baseline, and their standard deviation as scale.

    This is GRPO (arXiv 2402.03300). The deviation has ddof 1.

    Args:
        values: values that are compared with each other; None, NaN and infinity are left out.
        failed: credits of failed tries, which count in the scale only.

    Example:
        >>> [round(each.advantage(1.0), 3) for each in grpo([1, 0, 0, 0, 0, 0, 0, 0])][0]
        2.475
    """
    return _fill(values, failed, lambda s: [(fmean(s), spread([*s, *failed]))] * len(s))


def dr_grpo(values: Sequence[float | None], failed: Sequence[float] = ()) -> list[BaselineScale]:
    """Return for each value the mean of all as baseline, and 1 as scale.

    This is Dr. GRPO (arXiv 2503.20783). `failed` has the credits of failed tries.
    """
    return _fill(values, failed, lambda scored: [(fmean(scored), 1.0)] * len(scored))


def rloo(values: Sequence[float | None], failed: Sequence[float] = ()) -> list[BaselineScale]:
    """Return for each value the mean of the other values as baseline, and 1 as scale.

    This is RLOO (arXiv 2402.14740). With G values, its advantages are those of Dr. GRPO times
    G / (G - 1). `failed` has the credits of failed tries.
    """

    def others(scored: list[float]) -> list[tuple[float, float]]:
        total = math.fsum(scored)
        return [((total - value) / (len(scored) - 1), 1.0) for value in scored]

    return _fill(values, failed, others)


def ppo(values: Sequence[float | None], failed: Sequence[float] = ()) -> list[BaselineScale]:
    """Return for each value the mean of all as baseline, and their standard deviation as scale.

    The scale is 1 for fewer than two values, or if all are identical. With a critic only the scale
    is used, because the critic gives the baseline. The deviation has ddof 1.
    """
    return [
        s if s.zero_reason is ZeroReason.UNSCORED else msgspec.structs.replace(s, zero_reason=None)
        for s in grpo(values, failed)
    ]


def usable(value: float | None) -> float | None:
    """Return `value` as float64 (True is 1.0); None for None, NaN or infinity."""
    return None if value is None or not math.isfinite(value) else float(value)


def identical(values: Sequence[float]) -> bool:
    """Return whether values differ only by rounding.

    Rewards are sums of floats, so rounding can make equal rewards differ, and division by such a
    small spread would give full-size advantages. Up to the magnitude 1, values that differ by 1e-9
    of it are identical. Beyond, it is values that differ by 1e-9, or by 1e-13 of the magnitude if
    that is more: 1e9 and 1e9 + 1 differ. A difference of 1e-12 never counts.
    """
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    return high - low <= max(1e-9 * min(largest, 1.0), 1e-13 * largest, 1e-12)


def _scored(values: Sequence[float | None]) -> list[float]:
    return [value for value in map(usable, values) if value is not None]


def _fill(
    values: Sequence[float | None],
    failed: Sequence[float],
    rule: Callable[[list[float]], list[tuple[float, float]]],
) -> list[BaselineScale]:
    """Return baseline and scale of each value, by `rule` if some advantage is not zero.

    Args:
        values: values that are compared with each other; None, NaN and infinity are left out.
        failed: credits of failed tries.
        rule: function that returns (baseline, scale) of each remaining value.
    """
    scored = _scored(values)
    size, reason = len(scored), _zero_reason(scored, failed)
    results = rule(scored) if reason is None else [(fmean(scored), 1.0) for _ in scored]
    if reason is None and identical(scored):  # only failed tries differ: no advantage by rounding
        results = [(value, scale) for value, (_, scale) in zip(scored, results, strict=True)]
    pairs = iter(results)
    return [
        BaselineScale(0.0, 1.0, size, ZeroReason.UNSCORED)
        if usable(value) is None
        else BaselineScale(*next(pairs), size, reason)
        for value in values
    ]


def _zero_reason(scored: Sequence[float], failed: Sequence[float]) -> ZeroReason | None:
    """Return why each advantage among the values `scored` is zero; None if there is no reason.

    Args:
        scored: values that are compared with each other. None, NaN and infinity have been removed.
        failed: credits of failed tries.
    """
    if not scored:
        return ZeroReason.UNSCORED
    if len(scored) == 1:
        return ZeroReason.GROUP_OF_ONE
    return ZeroReason.IDENTICAL if identical([*scored, *failed]) else None


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation, ddof 1, of values that are not `identical`.

    Deviations are divided by the largest deviation before they are squared, because squares of very
    large or small rewards would overflow or vanish.
    """
    mean = fmean(values)
    widest = max(abs(value - mean) for value in values)
    squares = math.fsum(((value - mean) / widest) ** 2 for value in values)
    return widest * math.sqrt(squares / (len(values) - 1))


# --- a batch of groups ------------------------------------------------------------------------


def normalise(estimator: Estimator, observations: Sequence[Observation]) -> list[BaselineScale]:
    """Return baseline and scale of each observation of a batch, in the same order.

    Raises:
        ConfigError: `estimator` is unknown.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    if estimator == "reinforce++_baseline":
        return _apply(observations, lambda o: o.agent, _centre_by_group)
    rules: dict[str, _Rule] = {"dr_grpo": dr_grpo, "rloo": rloo, "ppo": ppo}
    rule, of_batch = rules.get(estimator, grpo), estimator in BATCH_ESTIMATORS
    return _apply(
        observations, lambda o: ("" if of_batch else o.group_id, o.agent), partial(_compare, rule)
    )


def mixture_statistics(
    estimator: Estimator, observations: Sequence[Observation]
) -> list[BaselineScale]:
    """Return for each observation the mean of its group's others, and a scale not of the group.

    They are for a critic with groups (`lightspan.lightning.mixture`). The scale is the standard
    deviation of the batch with `grpo`, as with `ppo`, and else 1; the mixture multiplies that of
    `grpo` and `dr_grpo` by n / (n - 1). Only a group of one has no advantage.
    """
    groups = normalise("rloo", observations)
    batch = normalise("ppo", observations) if estimator == "grpo" else groups
    return [
        msgspec.structs.replace(of_batch, baseline=own.baseline, size=own.size, zero_reason=reason)
        for own, of_batch in zip(groups, batch, strict=True)
        for reason in [None if own.zero_reason is ZeroReason.IDENTICAL else own.zero_reason]
    ]


_Rule = Callable[[Sequence[float | None], Sequence[float]], list[BaselineScale]]


def _compare(rule: _Rule, group: Sequence[Observation]) -> list[BaselineScale]:
    return rule([o.value for o in group], [o.failed for o in group if o.failed is not None])


def _apply(
    observations: Sequence[Observation],
    key: Callable[[Observation], Hashable],
    rule: Callable[[Sequence[Observation]], list[BaselineScale]],
) -> list[BaselineScale]:
    """Return baseline and scale of each observation, in the same order.

    Args:
        observations: observations of the batch.
        key: function of an observation. Observations with equal keys are compared with each other.
        rule: function that returns baseline and scale of such observations.
    """
    statistics: dict[int, BaselineScale] = {}
    for places in places_by(observations, key).values():
        statistics.update(zip(places, rule([observations[p] for p in places]), strict=True))
    return [statistics[place] for place in range(len(observations))]


def _centre_by_group(batch: Sequence[Observation]) -> list[BaselineScale]:
    """Return for each observation its group's mean, and one scale for the batch.

    This is `reinforce++_baseline`. The scale is the standard deviation, over the batch, of the
    differences from the group's mean. In groups of one or of identical values these are zero.

    Args:
        batch: all observations of a batch.
    """
    centred = _apply(batch, lambda o: o.group_id, partial(_compare, dr_grpo))
    differences = [
        statistics.advantage(number)
        for statistics, observation in zip(centred, batch, strict=True)
        for number in (usable(observation.value), observation.failed)
        if number is not None
    ]
    squares = math.fsum(d * d for d in differences)
    scale = math.sqrt(squares / (len(differences) - 1)) if squares else 1.0
    return [s if s.zero_reason else msgspec.structs.replace(s, scale=scale) for s in centred]


def places_by(items: Sequence[T], key: Callable[[T], Hashable]) -> dict[Hashable, list[int]]:
    """Return a mapping from each key to the indices of the items with this key.

    Args:
        items: the items.
        key: function that returns the key of an item.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, item in enumerate(items):
        places[key(item)].append(place)
    return places


def groups_without_variance(
    rewards: Mapping[str, Sequence[float | None]], failed: Mapping[str, Sequence[float]]
) -> dict[str, ZeroReason]:
    """Return group id → reason, for the groups whose advantages are all zero.

    Args:
        rewards: group id → total reward of each rollout; None for a rollout without reward.
        failed: group id → credits of failed tries; a group without any may be left out.
    """
    reasons = {g: _zero_reason(_scored(rewards[g]), failed.get(g, ())) for g in rewards}
    return {group_id: reason for group_id, reason in reasons.items() if reason is not None}


# --- explanations -----------------------------------------------------------------------------


class CreditTerm(msgspec.Struct, frozen=True):
    """One summand of an advantage, or of a mixed baseline: weight · (credit - baseline) / scale."""

    name: str
    credit: float
    baseline: float
    scale: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.weight * (self.credit - self.baseline) / self.scale


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Advantage and weight of a trained call, with all numbers that led to them."""

    rollout_id: str
    group_id: str
    agent_path: str
    estimator: str
    unit: str
    credit_rule: str
    weighting: str
    credit: float
    """Credit of the call, `shaping` and `penalty` included."""
    shaping: float | None = None
    """Part of `credit` that AIR added; None without AIR."""
    penalty: float | None = None
    """Part of `credit` that the call's length cost; None without `Overlong`."""
    expected: float | None = None
    """The critic's value of the call; None without a critic."""
    mixture: tuple[CreditTerm, ...] = ()
    """Summands of the baseline at lambda 1 (`lightspan.lightning.mixture`); empty unless a critic
    is used with groups.
    """
    value: float
    """Return of the rollout, which is the value of its observations; with the credit rule `family`
    the mean over its family.
    """
    baseline: float
    scale: float
    size: int
    """Number of observations in the statistics."""
    zero_reason: ZeroReason | None = msgspec.field(name="zero")
    turn: int = 0
    others: int = 0
    """Number of other calls in the baseline: of other rollouts; with `at_grpo` of all rollouts."""
    against: str = "rollouts"
    """What the compared calls have in common with this call, such as "in its turn"; "rollouts" if
    returns of rollouts are compared.
    """
    compared: float | None = None
    """Number from which the baseline is subtracted; None if it is `credit`."""
    terms: tuple[CreditTerm, ...] = ()
    """Further summands, which are added to the advantage."""
    tokens: int
    """Number of trained tokens of the call."""
    token_weight: float
    """Weight of each token in the loss."""
    share: float
    """The call's share of the weight of all tokens of its rollout and policy, 0 to 1."""

    @property
    def predicted(self) -> float | None:
        """The credit expected before the call: `mixture`, or `expected` if that is empty."""
        if not self.mixture:
            return self.expected
        return math.fsum(term.value for term in self.mixture)

    @property
    def advantage(self) -> float:
        """The advantage that the learner uses."""
        statistics = BaselineScale(self.baseline, self.scale, self.size, self.zero_reason)
        compared = self.credit if self.compared is None else self.compared
        return math.fsum([statistics.advantage(compared), *(term.value for term in self.terms)])
