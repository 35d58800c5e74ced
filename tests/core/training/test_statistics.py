"""Means with intervals, and paired gains."""

from __future__ import annotations

import math

import pytest

from lightspan.training.statistics import Interval, mean_interval, paired_gain


def test_mean_and_interval_are_the_textbook_ones() -> None:
    """Of 4 zeros and 6 ones: mean .6, variance 2.4 / 9, standard error sqrt(.26667 / 10)."""
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


def test_gain_takes_the_tasks_that_both_scored() -> None:
    gain = paired_gain({"a": 0.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "d": 0.0})
    assert (gain.mean, gain.n) == (0.5, 2)
    assert paired_gain({"a": 0.0}, {"b": 1.0}).n == 0


def test_bootstrap_interval_is_close_to_the_normal_one_and_repeatable() -> None:
    before = {f"t{n}": 0.0 for n in range(200)}
    after = {f"t{n}": float(n % 4 == 0) for n in range(200)}
    gain = paired_gain(before, after)
    assert gain.mean == 0.25
    half = 1.96 * math.sqrt(0.25 * 0.75 / 199)
    assert (gain.low, gain.high) == pytest.approx((0.25 - half, 0.25 + half), abs=0.01)
    assert paired_gain(before, after) == gain
