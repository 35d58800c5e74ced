"""Test advantage estimators as pure functions: tables, identities and edge cases."""

import math
import statistics

import pytest
from hypothesis import given, strategies as st

from lightspan.lightning.advantages import (
    ESTIMATORS,
    Observation,
    ZeroReason,
    dr_grpo,
    grpo,
    normalise,
    ppo,
    rloo,
)

rewards = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12)


def reinforce_pp_baseline(groups):
    observed = [
        Observation(f"r{n}-{m}", f"g{n}", value)
        for n, group in enumerate(groups)
        for m, value in enumerate(group)
    ]
    found = iter(normalise("reinforce++_baseline", observed))
    return [[next(found) for _ in group] for group in groups]


def of(statistics, values):
    return [n.advantage(0.0 if v is None else v) for n, v in zip(statistics, values, strict=True)]


@pytest.mark.parametrize(
    ("solved", "right", "wrong"),
    [
        (1, 2.475, -0.354),
        (2, 1.620, -0.540),
        (4, 0.935, -0.935),
        (6, 0.540, -1.620),
        (7, 0.354, -2.475),
    ],
)
def test_grpo_of_binary_rewards_in_groups_of_eight(solved, right, wrong):
    values = [1.0] * solved + [0.0] * (8 - solved)
    found = of(grpo(values), values)
    assert found[:solved] == [pytest.approx(right, abs=5e-4)] * solved
    assert found[solved:] == [pytest.approx(wrong, abs=5e-4)] * (8 - solved)


@given(rewards)
def test_grpo_is_the_textbook_formula(values):
    found = grpo(values)
    if found[0].zero_reason is None:
        mean, std = statistics.fmean(values), statistics.stdev(values)
        expected = [(value - mean) / std for value in values]
        assert of(found, values) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rewards)
def test_rloo_is_dr_grpo_times_g_over_g_minus_one(values):
    size = len(values)
    expected = [a * size / (size - 1) for a in of(dr_grpo(values), values)]
    assert of(rloo(values), values) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_reinforce_pp_has_the_statistics_of_the_batch():
    observed = [Observation(f"r{n}", f"g{n // 2}", v) for n, v in enumerate([1, 1, 0, 0])]
    found = normalise("reinforce++", observed)
    assert {(n.baseline, n.size, n.zero_reason) for n in found} == {(0.5, 4, None)}
    assert found[0].advantage(1.0) == pytest.approx(0.5 / math.sqrt(1 / 3))


def test_reinforce_pp_baseline_centres_by_group_and_scales_by_batch():
    groups = [[1.0, 0.0], [3.0, 3.0], [5.0]]
    pair, same, one = reinforce_pp_baseline(groups)
    scale = math.sqrt((0.25 + 0.25) / 4)
    assert of(pair, groups[0]) == [pytest.approx(0.5 / scale), pytest.approx(-0.5 / scale)]
    assert [each.zero_reason for each in same] == [ZeroReason.IDENTICAL] * 2
    assert [each.zero_reason for each in one] == [ZeroReason.GROUP_OF_ONE]
    assert of(same, groups[1]) + of(one, groups[2]) == [0.0, 0.0, 0.0]


# --- edge cases -------------------------------------------------------------------------------

SINGLE = [grpo, dr_grpo, rloo, lambda values: reinforce_pp_baseline([values])[0]]
UNSCORED, ONE, IDENTICAL = ZeroReason.UNSCORED, ZeroReason.GROUP_OF_ONE, ZeroReason.IDENTICAL


@pytest.mark.parametrize("rule", SINGLE)
@pytest.mark.parametrize(
    ("values", "reasons"),
    [
        ([], []),
        ([1.0], [ONE]),
        ([None, 1.0, math.nan], [UNSCORED, ONE, UNSCORED]),
        ([None, math.nan], [UNSCORED] * 2),
        ([0.3, 0.1 + 0.2], [IDENTICAL] * 2),  # rounding is not a difference
        ([1.0, 1e4 + 1.1 - 1e4 - 0.1], [IDENTICAL] * 2),
        ([1e12, math.nextafter(1e12, 2e12)], [IDENTICAL] * 2),
    ],
)
def test_what_has_no_advantage(rule, values, reasons):
    found = rule(values)
    assert [each.zero_reason for each in found] == reasons
    assert of(found, values) == [0.0] * len(values)


@pytest.mark.parametrize("rule", SINGLE)
@pytest.mark.parametrize(
    "values", [[0.5, 0.5 + 1e-7], [1e-6, 2e-6], [True, False], [1e9, 1e9 + 1], [1e12, 1e12 + 1]]
)
def test_a_small_difference_counts_in_full(rule, values):
    found = rule(values)
    assert [each.zero_reason for each in found] == [None, None]
    assert max(of(grpo(values), values)) == pytest.approx(0.7071, abs=1e-4)


@pytest.mark.parametrize("rule", SINGLE)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e9])
def test_identical_rewards_have_no_advantage(rule, value):
    statistics = rule([value] * 7)
    assert {each.zero_reason for each in statistics} == {ZeroReason.IDENTICAL}
    assert of(statistics, [value] * 7) == [0.0] * 7


@pytest.mark.parametrize("rule", SINGLE)
@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
def test_unscored_is_in_no_statistic(rule, missing):
    with_missing = rule([1.0, missing, 0.0, 0.5])
    without = rule([1.0, 0.0, 0.5])
    assert [with_missing[0], *with_missing[2:]] == without
    assert with_missing[1].zero_reason is ZeroReason.UNSCORED
    assert with_missing[1].advantage(1.0) == 0.0


def test_extreme_rewards_do_not_overflow():
    for scale in (1e-200, 1e200):
        values = [scale, 2 * scale, 4 * scale]
        expected = [-0.873, -0.218, 1.091] if scale > 1 else [0.0] * 3
        assert of(grpo(values), values) == pytest.approx(expected, abs=1e-3)


# --- batches ----------------------------------------------------------------------------------


def test_groups_do_not_mix_and_order_is_kept():
    observed = [
        Observation("r1", "a", 1.0),
        Observation("r2", "b", 10.0),
        Observation("r3", "a", 0.0),
        Observation("r4", "b", 20.0),
    ]
    found = normalise("dr_grpo", observed)
    assert [each.baseline for each in found] == [0.5, 15.0, 0.5, 15.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_agent_unit_with_one_agent_is_the_rollout_unit(estimator):
    values = [1.0, 0.0, 0.25, 1.0, 1.0, 0.5]
    rollouts = [Observation(f"r{n}", f"g{n % 2}", v) for n, v in enumerate(values)]
    agents = [Observation(f"r{n}", f"g{n % 2}", v, "writer") for n, v in enumerate(values)]
    assert normalise(estimator, rollouts) == normalise(estimator, agents)


def test_a_failed_try_gives_ppo_a_scale_and_a_group_of_one_nothing():
    """Check that only the failed try differs from equal values."""
    [scale] = {each.scale for each in ppo([1, 1, 1, 1], [0])}
    assert scale == pytest.approx(statistics.stdev([1, 1, 1, 1, 0]))
    for rule in (grpo, dr_grpo, rloo):
        assert [each.zero_reason for each in rule([1], [0])] == [ONE]
        assert [each.zero_reason for each in rule([1, 1], [1])] == [IDENTICAL] * 2
