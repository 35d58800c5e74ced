"""Means with intervals, and the paired gain between two evaluations.

Tasks that share something (a database, a document, a world) tell less than as many that share
nothing: an interval that takes them for independent is too narrow. Where clusters are named,
intervals are those of the cluster bootstrap (Davison and Hinkley 1997, 3.8): clusters are drawn
with replacement, each with all of its tasks. With a task in each cluster that is the plain
bootstrap. Below ten clusters or so its intervals are still too narrow.
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
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int
    clusters: int | None = None
    """In how many clusters the n are; None: each stands for itself."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} (95% CI {self.low:.3f}..{self.high:.3f}, {self.size})"

    @property
    def size(self) -> str:
        """What it is a mean of, for people."""
        among = "" if self.clusters is None else f" in {plural(self.clusters, 'cluster')}"
        return f"n={self.n}{among}"


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


def clustered_interval(values: Mapping[str, float], clusters: Mapping[str, str]) -> Interval:
    """The mean of tasks' values with its 95 % interval: without clusters that of `mean_interval`,
    else that of the cluster bootstrap.

    Args:
        clusters: task id → its cluster; empty for none. A task that is not in it stands for itself.
    """
    if not clusters:
        return mean_interval(list(values.values()))
    return _bootstrap(values, clusters)


def paired_gain(
    before: Mapping[str, float],
    after: Mapping[str, float],
    clusters: Mapping[str, str] | None = None,
) -> Interval:
    """Gain from `before` to `after` on the tasks that both scored, with a bootstrap interval.

    The interval is the 2.5th and 97.5th percentile of 2,000 resamplings of the tasks, or of their
    clusters. Paired: how hard a task is cancels, which an interval for each of the two means would
    count as noise.

    Args:
        clusters: as for `clustered_interval`.
    """
    gains = {key: after[key] - before[key] for key in sorted(before.keys() & after.keys())}
    return _bootstrap(gains, clusters or {})


def _bootstrap(values: Mapping[str, float], clusters: Mapping[str, str]) -> Interval:
    """The percentile bootstrap, over clusters or, without any, over tasks."""
    members: dict[Hashable, list[float]] = {}
    for task in sorted(values):
        # a pair is no text: a task that stands for itself is in no cluster that has its name
        members.setdefault(clusters.get(task, (task,)), []).append(values[task])
    drawn = [(math.fsum(found), len(found)) for found in members.values()]
    plain = mean_interval(list(values.values()))
    count = len(drawn) if clusters else None
    if len(drawn) < 2:  # one draw is as good as any other: nothing is known of the error
        return Interval(plain.mean, plain.mean, plain.mean, plain.n, count)
    rng = random.Random(0)  # the same rewards have the same interval, whenever it is asked for
    means = sorted(_mean(rng.choices(drawn, k=len(drawn))) for _ in range(RESAMPLES))
    return Interval(plain.mean, *percentiles(means), plain.n, count)


def _mean(drawn: Sequence[tuple[float, int]]) -> float:
    """The mean of all values in clusters, of which the sums and the sizes are given."""
    return math.fsum(total for total, _ in drawn) / sum(size for _, size in drawn)


def percentiles(ordered: Sequence[float]) -> tuple[float, float]:
    """The 2.5th and the 97.5th of 2,000, as places 50 and 1,950; of fewer or more likewise."""
    count = len(ordered)
    return ordered[round(0.025 * count) - 1], ordered[round(0.975 * count) - 1]
