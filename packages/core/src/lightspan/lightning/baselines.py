"""Baselines: what each call's credit is compared with, in float64.

Whether a comparison says anything, and on which scale, is decided by the *returns* of rollouts
(`lightspan.lightning.advantages`): a rollout's final reward and all rewards on its calls,
undiscounted and without potentials. What a call is compared with is decided by the credit rule:

    A = (G - b) / s

- `rollout`: b is the estimator's own, of the returns.
- `turn` (AT-GRPO's grouping, arXiv 2510.11062): b is the mean of G over *other* rollouts' calls of
  the same (population, agent, turn); where there is none, b0, the mean over other rollouts of the
  mean of their calls. A call is never compared with its own rollout, whose later calls follow from
  it: that is what makes the gradient unbiased.
- `anchor` (GiGPO's grouping, arXiv 2505.10978): b = (sum of G + k b') / (n + k) over the n calls of
  other rollouts with the same (population, agent, key). b' is the turn's b of the same kind,
  (sum + k b0) / (n + k), and k the `prior`. A call without a key has the turn's b.
- `critic`: b is what is left of G beside the call's advantage (`lightspan.lightning.gae`).

The population is the group; with `reinforce++` and `ppo` the batch; with unit `agent` one of them
by agent. Where the estimator compares a rollout with a mean that it is part of, s is divided by
(n - 1)/n for the n rollouts of the population: with gamma 1, no rewards on calls and equal turns
`turn` then equals `rollout`.

A group whose returns are all alike is silent under all of these but `critic`. That changes nothing
where G adds up to the return; with potentials it leaves out a little that was no noise (a bias of
.02 to .04 in groups of two, .01 to .02 in groups of four, on the enumerated process of the tests).

Two more as published, by name, which are biased (`docs/credit.md`):

- `at_grpo` (arXiv 2510.11062): b and s are mean and standard deviation (ddof 1) of G over *all*
  calls of the (population, agent, turn), the call itself included.
- `gigpo` (arXiv 2505.10978): A = A_E + omega A_S, the rollouts' advantage and that among all calls
  of the (population, agent, key), the call itself included; A_S of a call alone in its state is 0.
  With `grpo` both are divided by a standard deviation, with `dr_grpo` by 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from lightspan.lightning.advantages import (
    BaselineScale,
    CreditTerm,
    Estimator,
    ZeroReason,
    identical,
    spread,
)

Baseline = Literal["rollout", "turn", "anchor", "critic", "at_grpo", "gigpo"]
BASELINES: Final[tuple[Baseline, ...]] = (
    "rollout",
    "turn",
    "anchor",
    "critic",
    "at_grpo",
    "gigpo",
)
COMPARED_WITHOUT_ITSELF: Final[frozenset[Estimator]] = frozenset({"rloo", "ppo"})
"""Estimators whose baseline leaves the rollout itself out."""


class CallCredit(msgspec.Struct, frozen=True, kw_only=True):
    """A selected call with its credit, trained or not."""

    rollout_id: str
    population: Hashable
    """Those that it may be compared with."""
    agent_path: str
    turn: int
    credit: float
    """G, less the potential if AIR shapes by one, with its penalty."""
    shaping: float = 0.0
    """Minus the potential: part of `credit`."""
    penalty: float = 0.0
    """What it is paid less because it is too long: negative, part of `credit`."""
    value: float
    """The return of its rollout."""
    norm: BaselineScale
    """What its rollout's return is measured against."""
    key: Hashable = None
    """What tells its state; None: it shares none."""

    @property
    def rewards(self) -> float:
        """What of `credit` are rewards: scales, and whether calls differ, are of these alone."""
        return self.credit - self.shaping - self.penalty


class Comparison(NamedTuple):
    """What a call is measured against."""

    baseline: float
    scale: float
    others: int
    """Other calls (with `rollout`: rollouts, itself too) that the baseline is made of."""
    against: str
    """Where these are, for people."""
    zero: ZeroReason | None = None
    """Why it says nothing."""
    terms: tuple[CreditTerm, ...] = ()
    """What is added."""
    expected: float | None = None
    """What a critic said of the call."""
    compared: float | None = None
    """What is measured; None: the call's credit."""


def by_rollout(calls: Sequence[CallCredit], estimator: Estimator) -> list[Comparison]:
    """[calls] The estimator's own baselines, and what the calls of other rollouts are paid less on
    average: returns know nothing of penalties.

    Where the estimator compares a rollout with a mean that it is part of, so is the penalty, or it
    would weigh n/(n - 1) as much as rewards do: with rollouts of one call the baseline is that of
    returns with penalties, as in DAPO.
    """
    if not any(call.penalty for call in calls):
        return [_own(call.norm) for call in calls]
    penalties = [msgspec.structs.replace(call, credit=call.penalty) for call in calls]
    rest = _Others(penalties, _population)
    return [_with_penalty(call, rest.mean(call), estimator) for call in calls]


def _with_penalty(call: CallCredit, expected: float, estimator: Estimator) -> Comparison:
    norm = call.norm
    share = norm.scale / _scale(norm, estimator)
    baseline = norm.baseline + call.penalty - share * (call.penalty - expected)
    return _own(norm)._replace(baseline=baseline)


def by_turn(calls: Sequence[CallCredit], estimator: Estimator) -> list[Comparison]:
    """[calls] The mean of other rollouts' calls in the same turn."""
    rest, turns = _Others(calls, _population), _Others(calls, _turn)
    return [_by_turn(call, turns, rest, _scale(call.norm, estimator)) for call in calls]


def by_state(calls: Sequence[CallCredit], estimator: Estimator, prior: float) -> list[Comparison]:
    """[calls] The mean of other rollouts' calls in the same state, shrunk to that of their turn."""
    rest, turns = _Others(calls, _population), _Others(calls, _turn)
    states = _Others([call for call in calls if call.key is not None], _state)
    found = []
    for call in calls:
        scale = _scale(call.norm, estimator)
        if call.key is None:
            found.append(_by_turn(call, turns, rest, scale))
            continue
        total, count = turns.of(call)
        expected = _shrunk(total, count, rest.mean(call), prior)
        total, count = states.of(call)
        baseline = _shrunk(total, count, expected, prior)
        found.append(Comparison(baseline, scale, count, "in its state", call.norm.zero))
    return found


def at_grpo(calls: Sequence[CallCredit]) -> list[Comparison]:
    """[calls] AT-GRPO as published."""
    found: dict[int, Comparison] = {}
    for places in _places(calls, _turn).values():
        mean, scale = _mean_and_spread([calls[place] for place in places])
        why = ZeroReason.GROUP_OF_ONE if len(places) == 1 else ZeroReason.IDENTICAL
        zero = why if scale is None else None
        for place in places:
            compared = Comparison(mean, scale or 1.0, len(places) - 1, "in its turn", zero)
            found[place] = compared
    return [found[place] for place in range(len(calls))]


def gigpo(calls: Sequence[CallCredit], estimator: Estimator, omega: float) -> list[Comparison]:
    """[calls] GiGPO as published."""
    terms: dict[int, CreditTerm] = {}
    keyed = [call.key is not None for call in calls]
    for places in _places(calls, _state).values():
        mean, scale = _mean_and_spread([calls[place] for place in places])
        if scale is None:
            continue
        for place in places:
            if keyed[place]:
                by = scale if estimator == "grpo" else 1.0
                terms[place] = CreditTerm("state", calls[place].credit, mean, by, omega)
    return [
        own._replace(
            compared=call.value + call.penalty, terms=(terms[place],) if place in terms else ()
        )
        for place, (call, own) in enumerate(zip(calls, by_rollout(calls, estimator), strict=True))
    ]


def _own(norm: BaselineScale) -> Comparison:
    return Comparison(norm.baseline, norm.scale, norm.size, "rollouts", norm.zero)


def _scale(norm: BaselineScale, estimator: Estimator) -> float:
    if norm.zero is not None or estimator in COMPARED_WITHOUT_ITSELF or norm.size < 2:
        return norm.scale
    return norm.scale * norm.size / (norm.size - 1)


def _by_turn(call: CallCredit, turns: _Others, rest: _Others, scale: float) -> Comparison:
    total, count = turns.of(call)
    if count:
        return Comparison(total / count, scale, count, "in its turn", call.norm.zero)
    return Comparison(rest.mean(call), scale, rest.count(call), "in other turns", call.norm.zero)


def _shrunk(total: float, count: int, expected: float, prior: float) -> float:
    """The mean of so many numbers and `prior` times what was expected."""
    return (total + prior * expected) / (count + prior) if count + prior else expected


def _mean_and_spread(calls: Sequence[CallCredit]) -> tuple[float, float | None]:
    """(mean of the credits, standard deviation of what of them are rewards); None where these are
    one, or all alike: what shapes them would be all that is learned from."""
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


def _places(
    calls: Sequence[CallCredit], place_of: Callable[[CallCredit], Hashable]
) -> dict[Hashable, list[int]]:
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, call in enumerate(calls):
        places[place_of(call)].append(place)
    return places


class _Others:
    """Sums of credits over the calls of other rollouts that share a place.

    Args:
        calls: of any rollouts, in any order: sums are exact, so that it does not matter.
        place_of: call → what it shares with others.
    """

    def __init__(
        self, calls: Iterable[CallCredit], place_of: Callable[[CallCredit], Hashable]
    ) -> None:
        credits: dict[Hashable, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for call in calls:
            credits[place_of(call)][call.rollout_id].append(call.credit)
        self._place_of = place_of
        self._sums = {place: _Sums.of(by_rollout) for place, by_rollout in credits.items()}

    def of(self, call: CallCredit) -> tuple[float, int]:
        """(sum, number of calls)."""
        sums = self._sums.get(self._place_of(call))
        if sums is None:
            return 0.0, 0
        own, count = sums.own.get(call.rollout_id, (0.0, 0))
        count = sums.calls - count
        # a rest that is rounded at the size of the whole would not be 0 where nothing is left
        return (math.fsum([*sums.exact, -own]) if count else 0.0), count

    def count(self, call: CallCredit) -> int:
        """The number of calls."""
        return self.of(call)[1]

    def mean(self, call: CallCredit) -> float:
        """The mean over other rollouts of the mean of their calls; 0 where there is no other."""
        sums = self._sums[self._place_of(call)]
        others = len(sums.own) - (call.rollout_id in sums.own)
        if not others:
            return 0.0
        own = sums.means.get(call.rollout_id, 0.0)
        return math.fsum([*sums.means.values(), -own]) / others


class _Sums(NamedTuple):
    own: Mapping[str, tuple[float, int]]
    """Rollout → (sum, number) of its calls."""
    means: Mapping[str, float]
    exact: tuple[float, ...]
    """Numbers that add up to the sum of all."""
    calls: int

    @classmethod
    def of(cls, by_rollout: Mapping[str, Sequence[float]]) -> _Sums:
        own = {name: (math.fsum(values), len(values)) for name, values in by_rollout.items()}
        means = {name: total / count for name, (total, count) in own.items()}
        totals = tuple(total for total, _ in own.values())
        return cls(own, means, totals, sum(count for _, count in own.values()))
