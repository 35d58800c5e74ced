"""Test the mixture of a group, a critic and a state: its fit, its first step and its exact bias."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightspan import LightningRL
from lightspan.errors import ConfigError, DataError
from lightspan.lightning import Selection, build_episode, classify_calls, mixture
from lightspan.lightning.advantages import Observation, ZeroReason, mixture_statistics
from lightspan.lightning.baselines import CallCredit, Comparison, by_rollout, by_state, by_turn
from lightspan.lightning.batch import Batch, BatchConfig, prepare_batch
from lightspan.lightning.credit import Anchor, Credit, anchor, discounted, terminal
from lightspan.lightning.mixture import (
    MIN_GROUPS,
    MIN_TASKS,
    PRIOR_GROUPS,
    WINDOW,
    Coefficients,
    Mixture,
    StepMoments,
    fit,
    gradient_left,
    step_moments,
)
from lightspan.protocols.learner import Critic
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from packages.core.tests.lightning.enumerated import bias, scaled
from packages.core.tests.lightning.two_calls import PROCESSES, TwoCalls, Way, expectation

START = Coefficients()
MIXED = Coefficients(0.1, 0.4, 0.5, 0.3)


# --- groups of a random process ------------------------------------------------------------------
def credits_of(process: TwoCalls, ways: Sequence[Way], group: str = "g") -> list[CallCredit]:
    """Return the calls of a group, with the critic's values and their states as keys."""
    names = [f"{group}{number}" for number in range(len(ways))]
    pairs = list(zip(names, ways, strict=True))
    of_rollouts = mixture_statistics(
        "rloo", [Observation(n, group, way.reward) for n, way in pairs]
    )
    return [
        CallCredit(
            rollout_id=name,
            population=group,
            agent_path="a",
            turn=turn,
            credit=way.reward,
            value=way.reward,
            statistics=of_rollout,
            key=state,
            expected=process.values[state],
        )
        for (name, way), of_rollout in zip(pairs, of_rollouts, strict=True)
        for turn, state in enumerate(way.states)
    ]


def compared(calls: Sequence[CallCredit], coefficients: Coefficients) -> list[Comparison]:
    return Mixture(start=START, coefficients=coefficients).compare(calls, terminal, "rloo")


def moments(calls: Sequence[CallCredit], leave_out: str = "") -> StepMoments | None:
    """Return the moments of the calls, but for those of a rollout."""
    whys = [
        SimpleNamespace(
            zero_reason=found.zero_reason,
            mixture=found.mixture,
            credit=call.credit,
            group_id=call.population,
            agent_path=call.agent_path,
            unit="rollout",
        )
        for call, found in zip(calls, compared(calls, START), strict=True)
        if call.rollout_id != leave_out
    ]
    return step_moments(whys)  # type: ignore[arg-type]


def fitted(*parts: StepMoments | None) -> Coefficients:
    return fit([part for part in parts if part is not None], START)


def paid(calls: Sequence[CallCredit], coefficients: Sequence[Coefficients]) -> list[list[float]]:
    """Return the advantages of the two calls of each rollout, by coefficients per rollout."""
    by_coefficients = {each: compared(calls, each) for each in set(coefficients)}
    found = [
        call.credit - by_coefficients[coefficients[place // 2]][place].baseline
        for place, call in enumerate(calls)
    ]
    return [found[place : place + 2] for place in range(0, len(found), 2)]


Fit = Callable[[list[CallCredit], list[CallCredit]], list[Coefficients]]
"""Function from the calls of a group, and of another group, to the coefficients of each rollout."""


def of_others(own: list[CallCredit], other: list[CallCredit]) -> list[Coefficients]:
    return [fitted(moments(other))] * 2


def of_all(own: list[CallCredit], other: list[CallCredit]) -> list[Coefficients]:
    return [fitted(moments(own), moments(other))] * 2


def of_other_rollouts(own: list[CallCredit], other: list[CallCredit]) -> list[Coefficients]:
    """Leave out only the rollout itself: the other's mean of the group still has its return."""
    return [fitted(moments(own, f"g{number}"), moments(other)) for number in range(2)]


def bias_of(process: TwoCalls, rule: Fit) -> float:
    """Return the bias with two groups of two, of which the first is trained."""
    groups = process.groups(2)
    others = [(credits_of(process, ways, "h"), chance) for ways, chance in groups]
    found = expectation(
        (ways, paid(own, rule(own, other)), chance * other_chance)
        for ways, chance in groups
        for own in [credits_of(process, ways)]
        for other, other_chance in others
    )
    return bias(found, process.gradient)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit to any number of groups, with almost no weight of the first coefficients."""
    monkeypatch.setattr(mixture, "MIN_GROUPS", 1)
    monkeypatch.setattr(mixture, "PRIOR_GROUPS", 1e-3)


# --- bias, by enumeration -------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 3])
def test_fixed_coefficients_are_unbiased(size: int) -> None:
    """Check any coefficients and any values of a critic, with the gradient's exact length."""
    for process in PROCESSES:
        found = expectation(
            (ways, paid(credits_of(process, ways), [MIXED] * size), chance)
            for ways, chance in process.groups(size)
        )
        assert bias(found, process.gradient) < 1e-9
        assert scaled(found, process.gradient) == pytest.approx(1, abs=1e-9)


def test_a_fit_to_other_groups_is_unbiased(small: None) -> None:
    assert bias_of(PROCESSES[4], of_others) < 1e-9


@pytest.mark.parametrize("wrong", [of_all, of_other_rollouts])
def test_a_fit_that_contains_the_group_is_biased(small: None, wrong: Fit) -> None:
    """Check that the tests above could fail: the own group, or its other rollouts, in the fit."""
    assert bias_of(PROCESSES[4], wrong) > 0.05


@pytest.mark.parametrize("skips", [True, False])
def test_what_depends_on_the_group_is_biased(skips: bool) -> None:
    """Check groups of equal returns that are skipped, and a scale that is the group's deviation."""

    def wrong(ways: Sequence[Way], advantages: list[list[float]]) -> list[list[float]]:
        returns = [way.reward for way in ways]
        if len(set(returns)) == 1:
            return [[0.0, 0.0]] * len(ways) if skips else advantages
        scale = 1.0 if skips else statistics.stdev(returns)
        return [[advantage / scale for advantage in each] for each in advantages]

    biases = [
        bias(
            expectation(
                (ways, wrong(ways, paid(credits_of(process, ways), [MIXED] * 3)), chance)
                for ways, chance in process.groups(3)
            ),
            process.gradient,
        )
        for process in PROCESSES
    ]
    assert max(biases) > 0.02


# --- whole batches --------------------------------------------------------------------------------
def batch_of(
    groups: Sequence[Sequence[tuple[float, Sequence[int]]]],
    values: Sequence[float] = (),
    lam: float = 1.0,
    **settings: Any,
) -> Batch:
    """Return the batch of chains of calls of one agent.

    Args:
        groups: (reward, first token of the prompt of each call) of each rollout of each group.
        values: the critic's values, in the order of the calls; empty without a critic.
        lam: lambda of generalised advantage estimation.
        settings: settings of the batch.
    """
    config = BatchConfig(**settings)
    episodes = []
    for number, group in enumerate(groups):
        for place, (reward, prompts) in enumerate(group):
            name = f"{number}-{place}"
            records = [
                make_record(f"c{turn}", [token, turn], [5], (2 * turn + 1, 2 * turn + 2), name)
                for turn, token in enumerate(prompts)
            ]
            attempt, rollout = make_attempt(name, reward), make_rollout(name, f"g{number}")
            episodes.append(build_episode(attempt, rollout, [], records))
    step_rewards = config.credit.step_rewards
    routing = Selection.of("*").routing
    coverages = [classify_calls(e, routing, step_rewards=step_rewards) for e in episodes]
    builder = prepare_batch(episodes, coverages, config)
    if not values:
        return builder.finish()
    left = iter(values)
    by_call = {
        episode.rollout_id: {call.key: next(left) for call in episode.calls} for episode in episodes
    }
    return builder.finish(by_call, lam=lam)


GROUPS = [
    [(1.0, [1, 2]), (0.0, [1, 3]), (0.0, [1, 2])],
    [(1.0, [7, 8, 9]), (1.0, [7]), (0.0, [7, 9])],
    [(1.0, [4, 4]), (1.0, [4]), (1.0, [4])],
]
VALUES = [0.1 * place for place in range(16)]


def advantages(batch: Batch) -> list[float]:
    return [why.advantage for why in batch.explanations.values()]


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "grpo"])
@pytest.mark.parametrize("credit", [terminal, discounted(), anchor()])
def test_the_first_step_is_that_of_the_rule_without_a_critic(
    credit: Credit, estimator: Any
) -> None:
    """Check that values have no part in it; grpo has its baseline, over the batch's deviation."""
    settings = {"estimator": estimator, "credit": credit}
    plain = batch_of(GROUPS, **settings)
    mixed = batch_of(GROUPS, VALUES, mixture=Mixture.first(credit), **settings)
    if estimator == "rloo" and credit is terminal:
        assert advantages(mixed) == advantages(plain)
    if estimator == "grpo":
        plain = batch_of(GROUPS, **settings | {"estimator": "dr_grpo"})
        returns = [reward for group in GROUPS for reward, _ in group]
        mean = sum(returns) / 9
        scale = math.sqrt(sum((value - mean) ** 2 for value in returns) / 8)
        assert advantages(mixed) == pytest.approx([a / scale for a in advantages(plain)], abs=1e-12)
    else:
        assert advantages(mixed) == pytest.approx(advantages(plain), abs=1e-12)
    assert set(advantages(mixed)[-4:]) == {0.0}  # equal returns


def test_a_call_says_how_its_baseline_came_about() -> None:
    settings = {"estimator": "rloo", "mixture": Mixture(start=START, coefficients=MIXED)}
    batch = batch_of(GROUPS, VALUES, **settings)
    for why, value in zip(batch.explanations.values(), VALUES, strict=True):
        constant, group, critic, state = why.mixture
        assert (constant.value, critic.credit, why.expected) == (0.1, value, value)
        assert (
            why.predicted
            == why.baseline
            == pytest.approx(0.1 + 0.4 * group.credit + 0.5 * value + 0.3 * state.credit)
        )
        assert why.advantage == why.credit - why.baseline
    assert batch.counters["groups:identical"] == 1
    assert "zero:identical" not in batch.counters  # such a group teaches
    assert any(advantages(batch)[-4:])
    assert [why.mixture[1].credit for why in batch.explanations.values()][:6] == [
        *(0.0, 0.0),
        *(0.5, 0.5),
        *(0.5, 0.5),
    ]


@pytest.mark.parametrize("credit", [terminal, discounted(), anchor(), anchor(prior=2.0)])
def test_its_numbers_are_those_of_the_credit_rules(credit: Any) -> None:
    """Check m and anchor - m against the rules themselves, each of which leaves the rollout out."""
    process, ways = PROCESSES[0], [PROCESSES[0].ways[place][0] for place in (0, 3, 5, 5)]
    calls = credits_of(process, ways)
    states = by_state(calls, "rloo", getattr(credit, "prior", 1.0))
    groups = by_rollout(calls, "rloo") if credit is terminal else by_turn(calls, "rloo")
    found = Mixture.first(credit).compare(calls, credit, "rloo")
    for one, group, state in zip(found, groups, states, strict=True):
        numbers = [term.credit for term in one.mixture]
        assert numbers[1] == group.baseline
        assert numbers[3] == state.baseline - group.baseline
    wanted = states if isinstance(credit, Anchor) else groups
    assert [one.baseline for one in found] == pytest.approx([one.baseline for one in wanted])
    assert any(one.mixture[3].credit for one in found)


def test_every_rollout_counts_in_the_fit_whatever_its_advantage() -> None:
    """Check silent groups, and rollouts that no call of an agent to train belongs to."""
    groups = [*GROUPS, [(1.0, [5]), (0.0, [])]]
    batch = batch_of(groups, [*VALUES, 0.3], estimator="rloo", mixture=Mixture.first(terminal))
    found = step_moments(batch.explanations.values())
    assert found is not None
    assert (found.calls, found.groups) == (17, 4)
    last = [*batch.explanations.values()][-1]
    assert last.mixture[1].credit == 0.0  # the return of the rollout without a call
    credits = [why.credit for why in batch.explanations.values()]
    assert found.means[3] == pytest.approx(sum(credits) / 17)


def test_a_group_of_one_has_no_advantage_and_is_not_in_the_fit() -> None:
    groups = [*GROUPS, [(1.0, [5])]]
    mixed = Mixture(start=START, coefficients=MIXED)
    batch = batch_of(groups, [*VALUES, 0.3], estimator="rloo", mixture=mixed)
    last = [*batch.explanations.values()][-1]
    assert (last.advantage, last.zero_reason) == (0.0, ZeroReason.GROUP_OF_ONE)
    assert last.mixture[1].credit == 0.0  # and not its own return
    found = step_moments(batch.explanations.values())
    assert found is not None
    assert found.groups == 3


def test_lambda_builds_on_the_mixture() -> None:
    """Check GAE in a chain of two calls, whose values are the mixture."""
    mixed = Mixture(start=START, coefficients=MIXED)
    groups, settings = [[(1.0, [1, 2]), (0.0, [1, 2])]], {"estimator": "rloo", "mixture": mixed}
    batch = batch_of(groups, [0.2, 0.6, 0.2, 0.4], lam=0.5, **settings)
    first, second = [*batch.explanations.values()][:2]
    one, two = first.predicted, second.predicted
    assert one is not None
    assert two is not None
    assert second.advantage == pytest.approx(1 - two)
    assert first.advantage == pytest.approx(two - one + 0.5 * (1 - two))


# --- the fit --------------------------------------------------------------------------------------
def step_of(rows: Sequence[Sequence[float]], groups: int = MIN_GROUPS) -> StepMoments:
    """Return the moments of calls, each given as (m, V, anchor - m, credit)."""
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    products = tuple(
        tuple(math.fsum((r[i] - means[i]) * (r[j] - means[j]) for r in rows) for j in range(4))
        for i in range(4)
    )
    return StepMoments(len(rows), groups, tuple(means), products)


calls = st.lists(
    st.tuples(*[st.integers(-20, 20).map(lambda n: n / 10)] * 4), min_size=12, max_size=20
)


@given(calls, calls)
def test_errors_are_orthogonal_to_what_they_were_fitted_to(one: Any, two: Any) -> None:
    """Check the normal equations, with the ridge's force: Σ error · x = ridge · Σ x² · change."""
    groups = 10**9  # almost no ridge
    found = fit([step_of(one, groups), step_of(two, groups)], START)
    rows = [*one, *two]
    errors = [
        row[3] - found.constant - math.fsum(a * x for a, x in zip(found[1:], row[:3], strict=True))
        for row in rows
    ]
    assert math.fsum(errors) == pytest.approx(0, abs=1e-5)
    ridge = PRIOR_GROUPS / (2 * groups)
    for place in range(3):
        column = [row[place] for row in rows]
        mean = sum(column) / len(column)
        squares = math.fsum((x - mean) ** 2 for x in column)
        force = ridge * squares * (found[place + 1] - START[place + 1])
        product_sum = math.fsum(e * x for e, x in zip(errors, column, strict=True))
        assert product_sum == pytest.approx(force, abs=1e-5)


def test_steps_together_are_as_their_calls_in_one() -> None:
    rng = random.Random(4)
    rows = [[rng.random() for _ in range(4)] for _ in range(40)]
    parts = [step_of(rows[:10], 3), step_of(rows[10:], 7)]
    assert fit(parts, START) == pytest.approx(fit([step_of(rows, 10)], START), abs=1e-12)


def test_a_reward_far_from_zero_changes_no_slope() -> None:
    rng = random.Random(5)
    rows = [[rng.random() for _ in range(4)] for _ in range(40)]
    near = fit([step_of(rows)], START)
    far = fit([step_of([[m + 1e8, v + 1e8, d, g + 1e8] for m, v, d, g in rows])], START)
    assert far[1:] == pytest.approx(near[1:], abs=1e-6)


def test_what_does_not_vary_keeps_its_first_coefficient() -> None:
    rng = random.Random(6)
    rows = [[rng.random(), 0.5, 0.0, rng.random()] for _ in range(40)]
    found = fit([step_of(rows)], Coefficients(state=1.0))
    assert (found.critic, found.state) == (0.0, 1.0)
    assert found.group != 1.0
    flat = fit([step_of([[1.0, 1.0, 0.0, 1.0]] * 9)], START)
    assert flat == START


def test_rewards_whose_squares_overflow_keep_the_first_coefficients() -> None:
    step = StepMoments(9, MIN_GROUPS, (0.5,) * 4, ((math.inf,) * 4,) * 4)
    assert fit([step], START) == START


def test_few_groups_are_not_fitted_to() -> None:
    rng = random.Random(7)
    rows = [[rng.random() for _ in range(4)] for _ in range(40)]
    assert fit([step_of(rows, MIN_GROUPS - 1)], START) == START
    assert fit([step_of(rows, MIN_GROUPS)], START) != START


def test_only_the_last_steps_count_and_only_earlier_ones() -> None:
    """Check which steps the coefficients of each step come from, and that none is its own."""
    rng = random.Random(8)
    mixed = Mixture.first(terminal)
    seen = []
    for _ in range(WINDOW + 3):
        groups = [
            [(float(rng.random() < 0.5), [1, 2]) for _ in range(3)] for _ in range(MIN_GROUPS)
        ]
        values = [rng.random() for _ in range(6 * MIN_GROUPS)]
        batch = batch_of(groups, values, estimator="rloo", mixture=mixed)
        used = {tuple(term.weight for term in why.mixture) for why in batch.explanations.values()}
        assert used == {tuple(fit(seen[-WINDOW:], START) if seen else START)}
        seen.append(step_moments(batch.explanations.values()))
        mixed = mixed.after(batch.explanations.values())
        assert mixed.metrics()["mixture/groups"] == MIN_GROUPS * min(len(seen), WINDOW)
    assert list(mixed.steps) == seen[-WINDOW:]
    restored = msgspec.convert(msgspec.json.decode(msgspec.json.encode(mixed)), Mixture)
    assert restored == mixed


def test_a_critic_that_was_not_fitted_yet_is_not_fitted_to() -> None:
    first = Mixture.first(terminal)
    batch = batch_of(GROUPS, [0.0] * 16, estimator="rloo", mixture=first)
    assert first.after(batch.explanations.values()) == first


# --- what is left of a gradient -------------------------------------------------------------------
def test_gradient_left_by_hand() -> None:
    """Check a chain of three calls with constant values: lambda per call until the reward."""
    groups = [[(1.0, [1, 2, 3]), (0.0, [1, 2, 3])]]
    settings = {"estimator": "rloo", "weight": "transition"}
    mixed = Mixture(start=START, coefficients=Coefficients(0.5, 0.0, 0.0, 0.0))
    batch = batch_of(groups, [0.5] * 6, lam=0.5, mixture=mixed, **settings)
    [found] = gradient_left(batch.explanations.values(), 0.5).values()
    assert found == pytest.approx((1 + 0.5 + 0.25) / 3)
    assert gradient_left(batch.explanations.values(), 1.0) == {}
    assert gradient_left([], 0.5) == {}


# --- settings -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "reinforce++"}, r'applies to estimator="ppo", and to "grpo", "rloo" or "dr'),
        ({"estimator": "reinforce++_baseline"}, "not to 'reinforce.._baseline' with terminal"),
        ({"credit": "gigpo"}, r"not to 'grpo' with gigpo"),
        ({"credit": "at_grpo"}, r"not to 'grpo' with at_grpo"),
        ({"credit": "critic"}, r"credit critic\(1\) applies only to estimator='ppo', not 'grpo'"),
        ({"tasks_per_step": 1}, f"tasks_per_step=1 must be at least {MIN_TASKS}"),
        ({"resample": 2}, "resample=2: groups .* but critic= learns from those too"),
        ({"critic": 5}, r"critic=5: use lightspan\.Critic\(…\), or None"),
    ],
)
def test_what_does_not_go_with_a_critic_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningRL("m", **{"critic": True, **options})


def test_lambda_is_1_with_groups_unless_it_is_set() -> None:
    def lam(**options: Any) -> float | None:
        critic = LightningRL("m", **options).critic
        return None if critic is None else critic.lam

    assert lam() is lam(critic=False) is None
    assert lam(critic=True) == lam(critic=Critic()) == lam(estimator="rloo", critic=True) == 1
    assert lam(critic=Critic(lam=0.9)) == lam(critic=Critic(lam=0.9), estimator="ppo") == 0.9
    assert lam(estimator="ppo") == lam(estimator="ppo", critic=True) == 0.95


def test_values_are_needed_exactly_with_a_critic() -> None:
    mixed = Mixture.first(terminal)
    with pytest.raises(ConfigError, match="needs values"):
        batch_of(GROUPS, estimator="rloo", mixture=mixed)
    with pytest.raises(ConfigError, match="takes no values"):
        batch_of(GROUPS, VALUES, estimator="rloo")
    with pytest.raises(DataError, match="nan"):
        batch_of(GROUPS, [math.nan] * 16, estimator="rloo", mixture=mixed)


def test_a_checkpoint_has_coefficients_and_window() -> None:
    algorithm = LightningRL("m", critic=True)
    assert algorithm.state()["mixture"]["coefficients"] == (0.0, 1.0, 0.0, 0.0)
    rng = random.Random(9)
    rows = [[rng.random() for _ in range(4)] for _ in range(40)]
    steps = (step_of(rows[:20]), step_of(rows[20:]))
    stored = Mixture(start=START, coefficients=fit(steps, START), steps=steps)
    state = {"mixture": msgspec.json.decode(msgspec.json.encode(stored))}
    algorithm.load_state(state)
    assert algorithm.batch_config.mixture == stored
    assert algorithm.state()["mixture"] == msgspec.to_builtins(stored)
    assert "mixture" not in LightningRL("m").state()
    assert "mixture" not in LightningRL("m", estimator="ppo").state()
