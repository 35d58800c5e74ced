"""Means with intervals, and the paired gain between two evaluations."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import msgspec


class Interval(msgspec.Struct, frozen=True):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} (95% CI {self.low:.3f}..{self.high:.3f}, n={self.n})"


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean with its 95 % interval by the normal distribution; NaN where there is no value."""
    n = len(values)
    if not n:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, mean, mean, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = 1.96 * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)


def paired_gain(before: Mapping[str, float], after: Mapping[str, float]) -> Interval:
    """Gain from `before` to `after` on the tasks that both scored, with a bootstrap interval.

    The interval is the 2.5th and 97.5th percentile of 2,000 resamplings of the tasks. Paired: how
    hard a task is cancels, which an interval for each of the two means would count as noise.
    """
    gains = [after[key] - before[key] for key in sorted(before.keys() & after.keys())]
    plain = mean_interval(gains)
    if len(gains) < 2:
        return plain
    rng = random.Random(0)  # the same rewards have the same interval, whenever it is asked for
    n = len(gains)
    means = sorted(math.fsum(rng.choices(gains, k=n)) / n for _ in range(2000))
    return Interval(plain.mean, means[49], means[1949], n)
