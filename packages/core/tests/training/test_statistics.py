"""Test means with confidence intervals, and paired gains."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from lightspan.training.statistics import (
    Interval,
    clustered_interval,
    paired_gain,
    t_quantile,
)


def mean_interval(values: Sequence[float], lowest: float = 0.0) -> Interval:
    return clustered_interval({str(index): value for index, value in enumerate(values)}, {}, lowest)


@pytest.mark.parametrize(
    ("ones", "n", "low", "high"),
    [
        (6, 10, 0.2624, 0.8784),
        (0, 8, 0.0, 0.3694),
        (20, 20, 0.8316, 1.0),
        (19, 20, 0.7513, 0.9987),
        (1, 2, 0.0126, 0.9874),
        (250, 500, 0.4553, 0.5447),
    ],
)
def test_the_interval_of_a_share_is_the_textbook_one(
    ones: int, n: int, low: float, high: float
) -> None:
    """Check against the table of Clopper and Pearson, as R's `binom.test` has it."""
    interval = mean_interval([1.0] * ones + [0.0] * (n - ones))
    assert (interval.mean, interval.n) == (ones / n, n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)
    scaled = mean_interval([3.0] * ones + [1.0] * (n - ones))
    signed = mean_interval([1.0] * ones + [-1.0] * (n - ones), -1.0)
    assert (signed.low, signed.high) == pytest.approx((2 * low - 1, 2 * high - 1), abs=2e-4)
    if 0 < ones < n and n >= 8:
        assert (scaled.low, scaled.high) == pytest.approx((1 + 2 * low, 1 + 2 * high), abs=2e-4)


def test_the_interval_of_graded_rewards_is_students() -> None:
    """Check 0, .2, .4, .6: mean .3, standard error sqrt(.2 / 3 / 4), and t is 3.182."""
    interval = mean_interval([2.0, 2.2, 2.4, 2.6])
    half = 3.182 * math.sqrt(0.2 / 3 / 4)
    assert (interval.low, interval.high) == pytest.approx((2.3 - half, 2.3 + half), abs=1e-3)
    assert str(interval) == "2.300 (95% CI 1.889..2.711, n=4)"
    # rewards from 0 to 1 have no mean outside
    inside = mean_interval([0.0, 0.2, 0.4, 0.9])
    assert inside.low == 0.0
    assert 0.9 < inside.high < 1.0


@pytest.mark.parametrize(
    ("df", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (120, 1.980)],
)
def test_quantiles_of_students_t(df: int, expected: float) -> None:
    assert t_quantile(df) == pytest.approx(expected, rel=0.002)


def test_fewer_than_two_values_or_clusters_have_no_interval() -> None:
    one = mean_interval([0.25])
    assert (one.mean, one.n, one.is_known, str(one)) == (0.25, 1, False, "0.250 (no CI, n=1)")
    nothing = mean_interval([])
    assert nothing.n == 0
    assert math.isnan(nothing.mean)
    assert not nothing.is_known
    same = clustered_interval({"t1": 0.0, "t2": 1.0}, {"t1": "a", "t2": "a"})
    assert not same.is_known
    assert str(same) == "0.500 (no CI, n=2 in 1 cluster)"
    gain = paired_gain({"t1": 0.0, "t2": 1.0}, {"t1": 0.5, "t3": 1.0})
    assert (gain.mean, gain.n, gain.is_known) == (0.5, 1, False)


def test_equal_values_may_hide_rare_others() -> None:
    """Check that no interval has a width of 0."""
    none_changed = paired_gain(dict.fromkeys("abcd", 1.0), dict.fromkeys("abcd", 1.0))
    share = 1 - 0.025 ** (1 / 4)
    assert none_changed == Interval(0.0, -share, share, 4)
    half = mean_interval([0.5] * 4)
    assert (half.low, half.high) == pytest.approx((0.5 - share / 2, 0.5 + share / 2))
    # of a run that has had negative rewards, rewards of 1 have -1 for an opposite
    assert mean_interval([1.0] * 4).low == pytest.approx(1 - share)
    assert mean_interval([1.0] * 4, -0.5).low == pytest.approx(1 - 2 * share)
    assert paired_gain({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, None, -1.0).low < -1
    # nothing bounds what other rewards would be
    assert not mean_interval([7.0] * 4).is_known


def test_gain_is_paired_by_task() -> None:
    before = {f"t{n}": float(n) for n in range(10)}
    after = {f"t{n}": n + 0.5 + 0.1 * (n % 2) for n in range(10)}
    gain = paired_gain(before, after)
    assert (gain.mean, gain.n) == (pytest.approx(0.55), 10)
    half = 2.262 * math.sqrt(10 * 0.05**2 / 9 / 10)
    assert (gain.low, gain.high) == pytest.approx((0.55 - half, 0.55 + half), abs=1e-3)


# --- coverage -------------------------------------------------------------------------------
SIMULATIONS = 400


def coverage(make: Callable[[random.Random], Interval], mean: float) -> float:
    """Return the share of simulated intervals that contain the true mean."""
    rng = random.Random(0)
    intervals = [make(rng) for _ in range(SIMULATIONS)]
    assert all(interval.low < interval.high for interval in intervals)
    return sum(i.low <= mean <= i.high for i in intervals) / SIMULATIONS


@pytest.mark.parametrize(
    ("n", "share"), [(2, 0.5), (8, 0.05), (10, 0.9), (20, 0.95), (50, 0.98), (100, 0.5)]
)
def test_intervals_of_shares_cover(n: int, share: float) -> None:
    def make(rng: random.Random) -> Interval:
        interval = mean_interval([float(rng.random() < share) for _ in range(n)])
        assert 0 <= interval.low <= interval.high <= 1
        return interval

    assert coverage(make, share) >= 0.94


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 20])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.75, 0.9])
def test_intervals_of_rewards_of_minus_one_and_one_cover(n: int, share: float) -> None:
    """Check samples of a run that has had a reward of -1, which may all be 1 by chance."""

    def make(rng: random.Random) -> Interval:
        values = [1.0 if rng.random() < share else -1.0 for _ in range(n)]
        interval = mean_interval(values, -1.0)
        assert -1 <= interval.low <= interval.high <= 1
        return interval

    assert coverage(make, 2 * share - 1) >= 0.94


@pytest.mark.parametrize("sizes", [[5] * 2, [5] * 4, [5] * 10, [1, 8], [1, 8, 3, 12], [3, 9] * 5])
@pytest.mark.parametrize("graded", [True, False])
def test_intervals_over_clusters_cover(sizes: list[int], graded: bool) -> None:
    """Check clusters that differ in difficulty: the normal distribution covers 52 % of 2."""

    def make(rng: random.Random) -> Interval:
        values, clusters = {}, {}
        for name, size in enumerate(sizes):
            level = rng.gauss(0.5, 0.15)
            for task in range(size):
                value = level + rng.gauss(0, 0.1) if graded else float(rng.random() < level)
                values[f"{name}/{task}"], clusters[f"{name}/{task}"] = value, str(name)
        return clustered_interval(values, clusters)

    assert coverage(make, 0.5) >= 0.92


@pytest.mark.parametrize(("n", "solved", "lost"), [(5, 0.1, 0.0), (10, 0.5, 0.1), (40, 0.05, 0.05)])
def test_intervals_of_gains_cover(n: int, solved: float, lost: float) -> None:
    def make(rng: random.Random) -> Interval:
        before = {str(task): float(rng.random() < lost) for task in range(n)}
        after = {k: 0.0 if value else float(rng.random() < solved) for k, value in before.items()}
        return paired_gain(before, after)

    assert coverage(make, (1 - lost) * solved - lost) >= 0.9


# --- tasks in clusters ----------------------------------------------------------------------
def test_the_error_leaves_out_one_cluster_at_a_time() -> None:
    """Check clusters of 2, 2 and 4 tasks: without each, the means are 2/3, 1/2 and 1/4.

    By Kish's formula they count as 64 / 24 clusters, so t has 2 degrees of freedom.
    """
    rewards = {"a": [0.0, 0.0], "b": [0.5, 0.5], "c": [1.0, 1.0, 0.5, 0.5]}
    values = {f"{name}{n}": r for name, each in rewards.items() for n, r in enumerate(each)}
    found = clustered_interval(values, {task: task[0] for task in values})
    parts = [(mean - 0.5) ** 2 for mean in (4 / 6, 3 / 6, 1 / 4)]
    half = 4.3027 * math.sqrt(2 / 3 * sum(parts))
    assert (found.mean, found.n, found.clusters) == (0.5, 8, 3)
    assert (found.low, found.high) == (max(0.0, 0.5 - half), min(1.0, 0.5 + half))
    assert str(found).endswith("n=8 in 3 clusters)")


def test_tasks_that_are_alike_tell_no_more_than_one_of_them() -> None:
    """Compare four clusters of fifty equal tasks with four tasks, and with 200 independent ones."""
    before = {f"{cluster} {n}": 0.0 for cluster in "abcd" for n in range(50)}
    after = {task: float(task[0] in "ab") for task in before}
    clusters = {task: task[0] for task in before}
    found = paired_gain(before, after, clusters)
    four = paired_gain(dict.fromkeys("abcd", 0.0), {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0})
    assert (four.low, four.high) == pytest.approx((found.low, found.high))
    assert (found.n, found.clusters, four.clusters) == (200, 4, None)
    assert clustered_interval(after, {}) == mean_interval(list(after.values()))
    assert clustered_interval(after, {}).high < 0.6


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30))
def test_a_cluster_of_each_task_is_no_cluster(gains: list[float]) -> None:
    before = {f"t{n:02}": 0.0 for n in range(len(gains))}
    after = {f"t{n:02}": gain for n, gain in enumerate(gains)}
    plain = paired_gain(before, after)
    alone = paired_gain(before, after, {task: f"of {task}" for task in before})
    assert alone == Interval(plain.mean, plain.low, plain.high, plain.n, len(gains))
    assert -2 <= plain.low <= plain.mean <= plain.high <= 2
    # a task in no cluster stands for itself, whatever the clusters are called
    rest = paired_gain(before, after, {"t00": "t01"})
    assert (rest.low, rest.high, rest.clusters) == (plain.low, plain.high, len(gains))
