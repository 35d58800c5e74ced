"""Means with confidence intervals, and the paired gain between two evaluations.

Tasks that share a database, a document or a world are correlated, so an interval that treats them
as independent is too narrow. With clusters of such tasks, intervals come from the cluster bootstrap
(Davison and Hinkley 1997, 3.8): clusters are drawn with replacement, each with all of its tasks.
With one task per cluster that is the plain bootstrap. Below about ten clusters the intervals are
still too narrow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import msgspec

from lightspan.progress import plural

RESAMPLES: Final = 2000


class Interval(msgspec.Struct, frozen=True, omit_defaults=True):
    """A mean with its 95 % confidence interval; `n` is the number of values."""

    mean: float
    low: float
    high: float
    n: int
    clusters: int | None = None
    """Number of clusters; None if the values are independent."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} (95% CI {self.low:.3f}..{self.high:.3f}, {self.size})"

    @property
    def size(self) -> str:
        """The sample size as text."""
        clusters = "" if self.clusters is None else f" in {plural(self.clusters, 'cluster')}"
        return f"n={self.n}{clusters}"


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95 % confidence interval by the normal distribution.

    Without values, `mean`, `low` and `high` are NaN; with one value, all three equal it.
    """
    n = len(values)
    if not n:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, mean, mean, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = 1.96 * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)


def clustered_interval(values: Mapping[str, float], clusters: Mapping[str, str]) -> Interval:
    """Return the mean over tasks with its 95 % confidence interval.

    Args:
        values: task id → value.
        clusters: task id → cluster, for the cluster bootstrap; a task without an entry is a cluster
            of its own. If the mapping is empty, the interval is that of `mean_interval`.
    """
    if not clusters:
        return mean_interval(list(values.values()))
    return _bootstrap(values, clusters)


def paired_gain(
    before: Mapping[str, float],
    after: Mapping[str, float],
    clusters: Mapping[str, str] | None = None,
) -> Interval:
    """Return the gain from `before` to `after` on tasks scored in both, with a bootstrap interval.

    The interval is the 2.5th and 97.5th percentile of 2,000 resamplings of the tasks, or of their
    clusters. Pairing cancels the difficulty of the tasks, which separate intervals of the two means
    would count as noise.

    Args:
        before: task id → reward in the earlier evaluation.
        after: task id → reward in the later evaluation.
        clusters: task id → cluster (see `clustered_interval`); None or empty to resample tasks.
    """
    gains = {key: after[key] - before[key] for key in sorted(before.keys() & after.keys())}
    return _bootstrap(gains, clusters or {})


def _bootstrap(values: Mapping[str, float], clusters: Mapping[str, str]) -> Interval:
    """Return the mean with its 95 % confidence interval by the percentile bootstrap.

    Clusters are resampled, or tasks if `clusters` is empty.
    """
    members: dict[Hashable, list[float]] = {}
    for task in sorted(values):
        # A tuple as the key of an independent task cannot equal a cluster of the same name.
        members.setdefault(clusters.get(task, (task,)), []).append(values[task])
    sums = [(math.fsum(group), len(group)) for group in members.values()]
    plain = mean_interval(list(values.values()))
    count = len(sums) if clusters else None
    if len(sums) < 2:  # every draw is the same: the error is unknown
        return Interval(plain.mean, plain.mean, plain.mean, plain.n, count)
    rng = random.Random(0)  # a fixed seed: equal rewards give equal intervals
    means = sorted(_mean(rng.choices(sums, k=len(sums))) for _ in range(RESAMPLES))
    return Interval(plain.mean, *percentiles(means), plain.n, count)


def _mean(drawn: Sequence[tuple[float, int]]) -> float:
    """Return the mean of all values in `drawn`, which has (sum, number of values) per cluster."""
    return math.fsum(total for total, _ in drawn) / sum(size for _, size in drawn)


def percentiles(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentiles of sorted values.

    Of 2,000 values, these are the 50th and the 1,950th.
    """
    count = len(ordered)
    return ordered[round(0.025 * count) - 1], ordered[round(0.975 * count) - 1]
