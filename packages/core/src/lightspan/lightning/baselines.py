"""Baselines: the number that each call's credit is compared with, in float64.

The scale of a group, and whether it has variance, follow from the *returns* of rollouts
(`lightspan.lightning.advantages`). A return is a rollout's final reward plus all rewards on its
calls, undiscounted and without potentials. The advantage of a call with the credit G is

    A = (G - b) / s

with the scale s. The credit rule decides which calls are compared to get the baseline b:

- `rollout`: b is the estimator's baseline of returns.
- `turn` (AT-GRPO's grouping, arXiv 2510.11062): b is the mean of G over *other* rollouts' calls of
  the same (population, agent, turn). If there are none, it is b0: for each other rollout the mean
  of its calls, then the mean over these rollouts. A call is never compared with its own rollout,
  because its later calls depend on it: this keeps the gradient unbiased.
- `anchor` (GiGPO's grouping, arXiv 2505.10978): b = (sum of G + k b') / (n + k) over the n calls of
  other rollouts with the same (population, agent, state key). k is the `prior`. b' is computed in
  the same way over the calls of the turn: b' = (sum of G + k b0) / (n + k). A call without a state
  key is compared as with `turn`.
- `critic`: b is G minus the call's advantage (`lightspan.lightning.gae`).
- `family`: b is of other families or of other leaves (`lightspan.lightning.families`).

The population is the group, or the batch with `reinforce++` and `ppo`. With unit `agent` it is
split by agent. Let n be the number of its rollouts. If the estimator's mean includes the rollout
itself, s is divided by (n - 1)/n. Then `turn` equals `rollout` if gamma is 1, calls have no rewards
and the rollouts have equal turns.

A group whose returns are identical has advantage 0 under all of these but `critic`. That changes
nothing if G adds up to the return. With potentials it leaves out a little signal: on the process
that the tests enumerate, the bias is .02 to .04 in groups of two and .01 to .02 in groups of four.

Two more rules, as published, are biased (`docs/reference/credit.md`):

- `at_grpo` (arXiv 2510.11062, for calls that answer the same prompt): b and s are mean and
  standard deviation (ddof 1) of G over *all* calls of the (population, agent, turn), the call
  itself included.
- `gigpo` (arXiv 2505.10978): A = A_E + omega A_S. A_E is the rollout's advantage. A_S is the call's
  advantage among all calls of the (population, agent, state key), the call itself included. It is 0
  for a call alone in its state. With `grpo` both are divided by a standard deviation, with
  `dr_grpo` by 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from lightspan.lightning.advantages import (
    BaselineScale,
    CreditTerm,
    Estimator,
    ZeroReason,
    identical,
    places_by,
    spread,
)

Baseline = Literal["rollout", "turn", "anchor", "critic", "at_grpo", "gigpo", "family"]
BASELINES: Final[tuple[Baseline, ...]] = get_args(Baseline)
DEFAULT_PRIOR: Final = 1.0
"""Number of calls that the turn's mean counts for when it is averaged with the calls of a state."""
LEAVE_ONE_OUT: Final[frozenset[Estimator]] = frozenset({"rloo", "ppo"})
"""Estimators whose baseline excludes the rollout itself."""


class CallCredit(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an agent to train: its credit, and the data that decide what to compare it with."""

    rollout_id: str
    population: Hashable
    """Key of the population; calls with equal keys may be compared with each other."""
    agent_path: str
    turn: int
    credit: float
    """Reward-to-go or final reward, plus `shaping` and `penalty`."""
    shaping: float = 0.0
    """Part of `credit` that AIR's potential adds: minus the potential."""
    penalty: float = 0.0
    """Part of `credit` that the length penalty adds; at most 0."""
    value: float
    """Return (total reward) of the call's rollout."""
    statistics: BaselineScale
    """Baseline and scale of the rollout's return."""
    key: Hashable = None
    """Key of the call's state; None if no other call is in the same state."""
    expected: float | None = None
    """The critic's value of the call; None without one."""

    @property
    def rewards(self) -> float:
        """Part of `credit` that comes from rewards: without `shaping` and `penalty`."""
        return self.credit - self.shaping - self.penalty


class Comparison(NamedTuple):
    """What a call's credit is compared with: a baseline to subtract and a scale to divide by."""

    baseline: float
    scale: float
    others: int
    """Number of other calls in the baseline; of rollouts, including its own, if `against` is
    "rollouts".
    """
    against: str
    """What the compared calls have in common with the call, such as "in its turn"; "rollouts" if
    returns of rollouts are compared.
    """
    zero_reason: ZeroReason | None = None
    terms: tuple[CreditTerm, ...] = ()
    """Further summands, which are added to the advantage."""
    expected: float | None = None
    """The critic's value of the call; None without a critic."""
    mixture: tuple[CreditTerm, ...] = ()
    """Summands of the baseline at lambda 1, if a critic is used with groups."""
    compared: float | None = None
    """Number from which the baseline is subtracted; None if it is the call's credit."""


def by_rollout(calls: Sequence[CallCredit], estimator: Estimator) -> list[Comparison]:
    """Compare each call with the returns of rollouts, by the estimator's baseline.

    Returns contain no length penalties. So the mean penalty of other rollouts' calls is added to
    the baseline. If the estimator's mean of n returns includes the rollout itself, the mean penalty
    includes it too; otherwise a penalty would weigh n/(n - 1) times as much as a reward. With one
    call per rollout, the result is as in DAPO, where penalties are part of the returns.

    Args:
        calls: calls of agents to train in a batch.
        estimator: estimator of the advantages.
    """
    if not any(call.penalty for call in calls):
        return [_compare_rollouts(call.statistics) for call in calls]
    penalties = [msgspec.structs.replace(call, credit=call.penalty) for call in calls]
    others = _Others(penalties, _population)
    comparisons = []
    for call in calls:
        statistics = call.statistics
        share = statistics.scale / _scale(statistics, estimator)
        baseline = statistics.baseline + call.penalty - share * (call.penalty - others.mean(call))
        comparisons.append(_compare_rollouts(statistics)._replace(baseline=baseline))
    return comparisons


def by_turn(calls: Sequence[CallCredit], estimator: Estimator) -> list[Comparison]:
    """Compare each call with the same agent's calls in the same turn of other rollouts.

    The turn of a call is its depth in the causal order. If no other rollout has a call of the agent
    in this turn, the call is compared with all calls of other rollouts. Only calls with an equal
    `population` are compared.
    """
    rest, turns = _Others(calls, _population), _Others(calls, _turn)
    return [_compare_turns(call, turns, rest, estimator) for call in calls]


def by_state(calls: Sequence[CallCredit], estimator: Estimator, prior: float) -> list[Comparison]:
    """Compare each call with calls that the same agent made in the same state in other rollouts.

    The baseline is their mean credit, moved towards the mean of the turn by `prior`. A call without
    a state key is compared with the calls of its turn. Only calls with an equal `population` are
    compared.

    Args:
        calls: calls of agents to train in a batch.
        estimator: estimator of the advantages.
        prior: weight of the turn's mean, as a number of calls.
    """
    rest, turns = _Others(calls, _population), _Others(calls, _turn)
    states = _Others([call for call in calls if call.key is not None], _state)
    comparisons = []
    for call in calls:
        if call.key is None:
            comparisons.append(_compare_turns(call, turns, rest, estimator))
            continue
        baseline, count = rest.mean(call), 0
        for group in (turns, states):
            total, count = group.sum(call)
            if count + prior:
                baseline = (total + prior * baseline) / (count + prior)
        scale, reason = _scale(call.statistics, estimator), call.statistics.zero_reason
        comparisons.append(Comparison(baseline, scale, count, "in its state", reason))
    return comparisons


def by_critic(calls: Sequence[CallCredit]) -> list[Comparison]:
    """Compare each call with the critic's value; a call without one gets the baseline 0."""
    return [
        Comparison(one.expected or 0.0, one.statistics.scale, 0, "rollouts", expected=one.expected)
        for one in calls
    ]


def at_grpo(calls: Sequence[CallCredit]) -> list[Comparison]:
    """Compare each call as AT-GRPO does (arXiv 2510.11062), which samples siblings of one state.

    Calls of independent rollouts are siblings in the first turn only. Baseline and scale are the
    mean and the standard deviation of credits. They are computed over the agent's calls in the same
    turn, including the call itself. Only calls with an equal `population` are compared.
    """
    comparisons: dict[int, Comparison] = {}
    for places in places_by(calls, _turn).values():
        mean, scale = _mean_and_spread([calls[place] for place in places])
        alone = ZeroReason.GROUP_OF_ONE if len(places) == 1 else ZeroReason.IDENTICAL
        reason = alone if scale is None else None
        comparison = Comparison(mean, scale or 1.0, len(places) - 1, "in its turn", reason)
        comparisons |= dict.fromkeys(places, comparison)
    return [comparisons[place] for place in range(len(calls))]


def gigpo(calls: Sequence[CallCredit], estimator: Estimator, omega: float) -> list[Comparison]:
    """Compare each call as GiGPO does (arXiv 2505.10978).

    The advantage of a call is that of its rollout, plus `omega` times the call's advantage among
    all calls in the same state.

    Args:
        calls: calls of agents to train in a batch.
        estimator: `grpo`, which divides by a standard deviation, or `dr_grpo`, which does not.
        omega: weight of the advantage among calls in the same state.
    """
    terms: dict[int, tuple[CreditTerm]] = {}
    for places in places_by(calls, _state).values():
        mean, scale = _mean_and_spread([calls[place] for place in places])
        if scale is None or calls[places[0]].key is None:
            continue
        divisor = scale if estimator == "grpo" else 1.0
        for place in places:
            terms[place] = (CreditTerm("state", calls[place].credit, mean, divisor, omega),)
    return [
        comparison._replace(compared=call.value + call.penalty, terms=terms.get(place, ()))
        for place, (call, comparison) in enumerate(
            zip(calls, by_rollout(calls, estimator), strict=True)
        )
    ]


def _compare_rollouts(s: BaselineScale) -> Comparison:
    return Comparison(s.baseline, s.scale, s.size, "rollouts", s.zero_reason)


def _compare_turns(
    call: CallCredit, turns: _Others, rest: _Others, estimator: Estimator
) -> Comparison:
    scale, reason = _scale(call.statistics, estimator), call.statistics.zero_reason
    total, count = turns.sum(call)
    if count:
        return Comparison(total / count, scale, count, "in its turn", reason)
    return Comparison(rest.mean(call), scale, rest.sum(call)[1], "in other turns", reason)


def _scale(statistics: BaselineScale, estimator: Estimator) -> float:
    """Return the scale to use with a baseline that leaves out the call's own rollout.

    For n rollouts, it is n/(n - 1) times the estimator's scale if the baseline of `estimator`
    includes that rollout. Otherwise it is the estimator's scale.

    Args:
        statistics: baseline and scale that the estimator computed for the call's rollout.
        estimator: the estimator.
    """
    size = statistics.size
    if statistics.zero_reason is not None or estimator in LEAVE_ONE_OUT or size < 2:
        return statistics.scale
    return statistics.scale * size / (size - 1)


def _mean_and_spread(calls: Sequence[CallCredit]) -> tuple[float, float | None]:
    """Return the mean of the calls' credits, and the standard deviation to divide by.

    The deviation is None for a single call, or if the calls' rewards are identical: credits then
    differ only by shaping, which must not be scaled up.
    """
    mean = math.fsum(call.credit for call in calls) / len(calls)
    rewards = [call.rewards for call in calls]
    return mean, None if len(rewards) == 1 or identical(rewards) else spread(rewards)


# --- other rollouts ---------------------------------------------------------------------------


def _population(call: CallCredit) -> Hashable:
    return call.population


def _turn(call: CallCredit) -> Hashable:
    return call.population, call.agent_path, call.turn


def _state(call: CallCredit) -> Hashable:
    return call.population, call.agent_path, call.key


class _Others:
    """Sums of the credits of calls, each over all rollouts other than that of a given call.

    Args:
        calls: calls of any rollouts, in any order.
        group_of: function of a call. Calls for which it returns the same key are summed together.
    """

    def __init__(
        self, calls: Iterable[CallCredit], group_of: Callable[[CallCredit], Hashable]
    ) -> None:
        credits: dict[Hashable, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for call in calls:
            credits[group_of(call)][call.rollout_id].append(call.credit)
        self._group_of = group_of
        self._sums = {
            group: {rollout: (math.fsum(values), len(values)) for rollout, values in own.items()}
            for group, own in credits.items()
        }

    def _of(self, call: CallCredit) -> list[tuple[float, int]]:
        """Return the sum and the number of the credits in each other rollout.

        Only calls in the group of `call` count.
        """
        sums = self._sums.get(self._group_of(call), {})
        return [each for rollout, each in sums.items() if rollout != call.rollout_id]

    def sum(self, call: CallCredit) -> tuple[float, int]:
        """Return the sum and the number of the credits in all other rollouts together.

        Only calls in the group of `call` count.
        """
        others = self._of(call)
        return math.fsum(total for total, _ in others), sum(count for _, count in others)

    def mean(self, call: CallCredit) -> float:
        """Return the mean over other rollouts of the mean credit in each.

        Only calls in the group of `call` count; 0 if no other rollout has any.
        """
        means = [total / count for total, count in self._of(call)]
        return math.fsum(means) / len(means) if means else 0.0
