"""Test means with confidence intervals, and paired gains."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from lightspan.training.statistics import (
    Interval,
    clustered_interval,
    mean_interval,
    paired_gain,
)


def test_mean_and_interval_are_the_textbook_ones() -> None:
    """Check 4 zeros and 6 ones: mean .6, variance 2.4 / 9, standard error sqrt(.26667 / 10)."""
    interval = mean_interval([0.0] * 4 + [1.0] * 6)
    half = 1.96 * math.sqrt(2.4 / 9 / 10)
    assert interval.n == 10
    assert interval.mean == pytest.approx(0.6)
    assert (interval.low, interval.high) == pytest.approx((0.6 - half, 0.6 + half))
    assert str(interval) == "0.600 (95% CI 0.280..0.920, n=10)"


def test_nothing_and_one_value() -> None:
    assert mean_interval([0.25]) == Interval(0.25, 0.25, 0.25, 1)
    nothing = mean_interval([])
    assert nothing.n == 0
    assert math.isnan(nothing.mean)


def test_gain_is_paired_by_task() -> None:
    before = {f"t{n}": float(n) for n in range(10)}
    after = {f"t{n}": float(n) + 0.5 for n in range(10)}
    assert paired_gain(before, after) == Interval(0.5, 0.5, 0.5, 10)


def test_bootstrap_interval_is_close_to_the_normal_one_and_repeatable() -> None:
    before = {f"t{n}": 0.0 for n in range(200)}
    after = {f"t{n}": float(n % 4 == 0) for n in range(200)}
    gain = paired_gain(before, after)
    assert gain.mean == 0.25
    half = 1.96 * math.sqrt(0.25 * 0.75 / 199)
    assert (gain.low, gain.high) == pytest.approx((0.25 - half, 0.25 + half), abs=0.01)
    assert paired_gain(before, after) == gain


# --- tasks in clusters ----------------------------------------------------------------------
def test_two_clusters_have_three_means() -> None:
    """Check that the samples a a, a b, b a and b b have means 0, 1/3, 1/3 and 1."""
    values = {"t1": 0.0, "t2": 0.0, "t3": 1.0}
    found = clustered_interval(values, {"t1": "a", "t2": "a", "t3": "b"})
    assert found == Interval(pytest.approx(1 / 3), 0.0, 1.0, 3, 2)  # type: ignore[arg-type]
    assert str(found) == "0.333 (95% CI 0.000..1.000, n=3 in 2 clusters)"


def test_tasks_that_are_alike_tell_no_more_than_one_of_them() -> None:
    """Compare four clusters of fifty equal tasks with four tasks, and with 200 independent ones."""
    values = {f"{cluster} {n}": float(cluster in "ab") for cluster in "abcd" for n in range(50)}
    clusters = {task: task[0] for task in values}
    found = clustered_interval(values, clusters)
    assert found == Interval(0.5, 0.0, 1.0, 200, 4)
    four = paired_gain(dict.fromkeys("abcd", 0.0), {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0})
    assert (four.low, four.high) == (found.low, found.high)
    assert clustered_interval(values, {}) == mean_interval(list(values.values()))
    assert clustered_interval(values, {}).high < 0.6


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30))
def test_a_cluster_of_each_task_is_the_plain_bootstrap(gains: list[float]) -> None:
    before = {f"t{n:02}": 0.0 for n in range(len(gains))}
    after = {f"t{n:02}": gain for n, gain in enumerate(gains)}
    plain = paired_gain(before, after)
    alone = paired_gain(before, after, {task: f"of {task}" for task in before})
    assert alone == Interval(plain.mean, plain.low, plain.high, plain.n, len(gains))
    # a task in no cluster stands for itself, whatever the clusters are called
    rest = paired_gain(before, after, {"t00": "t01"})
    assert (rest.low, rest.high, rest.clusters) == (plain.low, plain.high, len(gains))
