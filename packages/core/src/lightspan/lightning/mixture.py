"""Mixture: a critic's value and the mean of the group, weighted by least squares.

With `critic=` and an estimator of groups, a call is compared with

    b = a0 + a1 m + a2 V + a3 (anchor - m)

- m: baseline of the credit rule over the *other* rollouts of the group (`terminal`: their mean
  return; `discounted` and `anchor`: the mean credit of their calls in the turn);
- V: the critic's value of the call, from before it was fitted to the step;
- anchor: baseline over other rollouts' calls in the same state (`lightspan.lightning.baselines`).

The coefficients a minimise the squares of (credit - b) over the calls of the last `WINDOW` steps
before this one. They start at (0, 1, 0, 0), with `anchor` at (0, 1, 0, 1), which is the credit rule
without a critic. b is then a statistic of other rollouts, of the call's prompt and of earlier
steps, so it leaves the gradient unbiased with a scale that does not depend on the group's returns
(control variates, Greensmith et al., JMLR 5, 2004). It would not if the fit included the group that
b is used on, because a group's means contain each other's returns. Nor would it over the *group's*
deviation: the scale is that of the batch's returns with `grpo`, and 1 with `rloo` and `dr_grpo`;
with `grpo` and `dr_grpo` it is multiplied by n / (n - 1) in a group of n scored rollouts, because
their mean includes the rollout, and m does not.

For the same reason a group whose returns are all the same teaches: b differs from its returns, and
leaving such groups out would depend on the answers. With the first coefficients and `terminal` b is
equal to its returns, and its advantages are 0. A group of one rollout has no m; its advantage is 0.

The fit covers every call with a value, of every scored, undamaged and accepted rollout, whatever
its advantage. A step whose values are all the same (the critic is not fitted yet) is left out. One
fit serves all policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning import baselines
from lightspan.lightning.advantages import CreditTerm, Estimator, Explanation, ZeroReason
from lightspan.lightning.credit import Credit, baseline_of

WINDOW: Final = 4
"""Number of earlier steps to which coefficients are fitted."""
MIN_GROUPS: Final = 8
"""Minimum number of groups to which coefficients are fitted. Within few groups the mean of the
others falls where the own return rises, and coefficients would follow that."""
PRIOR_GROUPS: Final = 3.0
"""Weight of the first coefficients in the fit, as a number of groups (a ridge on standardised
numbers)."""
ESTIMATORS: Final[tuple[Estimator, ...]] = ("grpo", "rloo", "dr_grpo")
"""Estimators of groups with which a critic can be used; with `ppo` it is used alone."""
MIN_TASKS: Final = math.ceil(MIN_GROUPS / WINDOW)
"""Minimum number of tasks per step."""
_CRITIC: Final = 1
_CREDIT: Final = 3
"""Places of V and of the credit in `StepMoments.means`."""


class Coefficients(NamedTuple):
    """Weights of the summands of a baseline."""

    constant: float = 0.0
    group: float = 1.0
    """Weight of m."""
    critic: float = 0.0
    """Weight of V."""
    state: float = 0.0
    """Weight of anchor - m."""


def check_mixed(estimator: Estimator, credit: Credit) -> None:
    """Raise `ConfigError` unless a critic can be used with the estimator and the credit rule."""
    if estimator not in ESTIMATORS or baseline_of(credit) not in ("rollout", "turn", "anchor"):
        raise ConfigError(
            'critic= applies to estimator="ppo", and to "grpo", "rloo" or "dr_grpo" with credit='
            f'"terminal", "discounted" or "anchor": not to {estimator!r} with {credit.name}'
        )


class StepMoments(msgspec.Struct, frozen=True):
    """What a fit needs of the calls of a step: means and summed products of deviations from them.

    The numbers of a call are m, V, anchor - m and its credit.
    """

    calls: int
    groups: int
    means: tuple[float, ...]
    products: tuple[tuple[float, ...], ...]
    """[number, number] Σ over calls of the product of the deviations of two numbers."""


def step_moments(explanations: Iterable[Explanation]) -> StepMoments | None:
    """Return the moments of a step's calls; None if no call has a group, or V does not vary.

    Args:
        explanations: one per call that can be trained, with a mixture.
    """
    whys = [why for why in explanations if why.zero_reason is not ZeroReason.GROUP_OF_ONE]
    rows = [(*(term.credit for term in why.mixture[1:]), why.credit) for why in whys]
    columns = list(zip(*rows, strict=True))
    if not rows or min(columns[_CRITIC]) == max(columns[_CRITIC]):  # the critic is not fitted yet
        return None
    means = tuple(math.fsum(column) / len(rows) for column in columns)
    deviations = [[x - mean for x in c] for c, mean in zip(columns, means, strict=True)]
    products = tuple(tuple(_dot(one, other) for other in deviations) for one in deviations)
    groups = {(why.group_id, why.agent_path if why.unit == "agent" else "") for why in whys}
    return StepMoments(len(rows), len(groups), means, products)


def fit(steps: Sequence[StepMoments], start: Coefficients) -> Coefficients:
    """Return the coefficients with the least squared error over the calls of `steps`.

    The normal equations are solved for the differences from `start`, on standardised numbers and
    with a ridge of `PRIOR_GROUPS` groups. A number that does not vary keeps its coefficient of
    `start`. The result is `start` for fewer than `MIN_GROUPS` groups.
    """
    calls, groups = sum(step.calls for step in steps), sum(step.groups for step in steps)
    if groups < MIN_GROUPS:
        return start
    means = [math.fsum(step.calls * step.means[i] for step in steps) / calls for i in range(4)]

    def covariance(i: int, j: int) -> float:
        """Return the covariance of two numbers over the calls of all steps together."""
        between = (s.calls * (s.means[i] - means[i]) * (s.means[j] - means[j]) for s in steps)
        return math.fsum((*between, *(step.products[i][j] for step in steps))) / calls

    spreads = [math.sqrt(covariance(i, i)) for i in range(4)]
    least = 1e-9 * max(map(abs, [*means, *spreads]))
    varied = [i for i in range(_CREDIT) if spreads[i] > least]
    slopes, rows = list(start[1:]), list[list[float]]()
    for i in varied:
        row = [covariance(i, j) / spreads[i] / spreads[j] for j in varied]
        row[len(rows)] += PRIOR_GROUPS / groups
        error = covariance(i, _CREDIT) - _dot(slopes, (covariance(i, j) for j in range(_CREDIT)))
        rows.append([*row, error / spreads[i]])
    for i, change in zip(varied, _solve(rows), strict=True):
        slopes[i] += change / spreads[i]
    coefficients = Coefficients(means[_CREDIT] - _dot(slopes, means[:_CREDIT]), *slopes)
    # squares of rewards may overflow
    return coefficients if all(map(math.isfinite, coefficients)) else start


def _solve(rows: list[list[float]]) -> list[float]:
    """Return x with A x = b, for rows (A | b) and a positive definite A (Gauss-Jordan)."""
    for place, pivot in enumerate(rows):
        pivot[:] = [x / pivot[place] for x in pivot]
        for row in rows:
            if row is not pivot:
                row[:] = [x - row[place] * y for x, y in zip(row, pivot, strict=True)]
    return [row[-1] for row in rows]


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    return math.fsum(x * y for x, y in zip(one, other, strict=True))


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of a step, and the earlier steps to which they are fitted."""

    start: Coefficients
    """Coefficients with which the baseline is that of the credit rule without a critic."""
    coefficients: Coefficients
    steps: tuple[StepMoments, ...] = ()
    """Moments of the last `WINDOW` steps, oldest first."""

    @classmethod
    def first(cls, credit: Credit) -> Mixture:
        """Return the mixture of a run's first step, for a credit rule."""
        start = Coefficients(state=1.0 if baseline_of(credit) == "anchor" else 0.0)
        return cls(start=start, coefficients=start)

    def after(self, explanations: Iterable[Explanation]) -> Mixture:
        """Return the mixture of the step after that of `explanations`, one per call."""
        step = step_moments(explanations)
        steps = (*self.steps, *([] if step is None else [step]))[-WINDOW:]
        return Mixture(start=self.start, coefficients=fit(steps, self.start), steps=steps)

    def metrics(self) -> dict[str, float]:
        """Return the coefficients, and the number of groups to which they are fitted."""
        values = self.coefficients._asdict() | {"groups": sum(step.groups for step in self.steps)}
        return {f"mixture/{name}": float(value) for name, value in values.items()}

    def compare(
        self, calls: Sequence[baselines.CallCredit], credit: Credit, estimator: Estimator
    ) -> list[baselines.Comparison]:
        """Compare each call with the mixture; a call without a value has the value 0 in it.

        Args:
            calls: all calls of agents to train in a batch, with statistics of
                `lightspan.lightning.advantages.mixture_statistics`.
            credit: credit rule, which defines m and the state.
            estimator: estimator of the advantages.
        """
        rule = baselines.by_rollout if baseline_of(credit) == "rollout" else baselines.by_turn
        prior = getattr(credit, "prior", baselines.DEFAULT_PRIOR)
        states = baselines.by_state(calls, estimator, prior)
        comparisons = []
        for call, group, state in zip(calls, rule(calls, "rloo"), states, strict=True):
            # the mean return of a group of one would be the rollout's own
            others = group.baseline if state.zero_reason is None else state.baseline
            numbers = (1.0, others, call.expected or 0.0, state.baseline - others)
            pairs = zip(Coefficients._fields, numbers, self.coefficients, strict=True)
            terms = tuple(CreditTerm(name, x, 0.0, 1.0, weight) for name, x, weight in pairs)
            comparison = state._replace(baseline=math.fsum(term.value for term in terms))
            comparisons.append(comparison._replace(expected=call.expected, mixture=terms))
        return comparisons


def gradient_left(explanations: Iterable[Explanation], lam: float) -> dict[str, float]:
    """Return how much of the batch's gradient lambda below 1 leaves, as the metric `gradient_left`.

    It is the relative length Σ w² T A A₁ / Σ w² T A₁² over calls, with A the advantage, A₁ the
    advantage at lambda 1, w the weight of a token and T the number of tokens: the projection of the
    batch's gradient on its gradient at lambda 1, if the scores of tokens are orthogonal and equally
    long.

    It measures the gradient of *this batch*, most of which is noise, and not the expected gradient,
    whose relative length is what a bias costs. Advantages alone do not tell that one. If values do
    not vary between calls, both lose the same. The better the values are, the more of what is lost
    is noise, and the more is left of the expected gradient than this number says
    (`docs/evidence/credit-comparison.md` has both for processes whose gradient is known).

    Args:
        explanations: one per call of the batch.
        lam: lambda of the batch. At 1 the result is empty, as without any advantage.
    """
    products, squares = [], []
    for why in explanations if lam < 1 else ():
        if (predicted := why.predicted) is not None and why.zero_reason is None:
            weight = why.token_weight**2 * why.tokens * (why.credit - predicted) / why.scale**2
            products.append(weight * (why.credit - why.baseline))
            squares.append(weight * (why.credit - predicted))
    total = math.fsum(squares)
    return {"gradient_left": math.fsum(products) / total} if total else {}
