"""Means with confidence intervals that hold for few tasks, and the paired gain of two evaluations.

Tasks that share a database, a document or a world form a cluster: their rewards are correlated, so
an interval that treats them as independent is too narrow. Intervals are Student's t over clusters.
A task without a cluster is a cluster of its own. The variance is the jackknife's, which leaves out
one cluster at a time (Bell and McCaffrey 2002, Survey Methodology 28(2)), because large and small
clusters weigh differently. Shares of independent tasks get the exact interval (Clopper and Pearson
1934, Biometrika 26(4)). With fewer than two clusters there is no interval.

If all rewards are equal, the interval depends on the range of rewards. It is 0 to 1, or -1 to 1 if
the run has had a negative reward. So if negative rewards are possible and none was seen yet, the
interval of a sample of equal rewards is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from typing import Final

import msgspec

from lightspan.progress import plural

TAIL: Final = 0.025
"""Probability that an interval lies above the true mean, and that it lies below."""
Z: Final = 1.959964
"""97.5 % quantile of the normal distribution."""
MIN_SHARE_TASKS: Final = 8
"""Minimum number of tasks with two distinct rewards that count as a share, if further rewards may
lie between or beyond them."""


class Interval(msgspec.Struct, frozen=True, omit_defaults=True):
    """A mean with its 95 % confidence interval; `n` is the number of values.

    If there is no interval, `low` and `high` are not finite. This is so for fewer than two clusters
    (or independent values), and for equal values whose range is unknown.
    """

    mean: float
    low: float
    high: float
    n: int
    clusters: int | None = None
    """Number of clusters; None if the values are independent."""

    def __str__(self) -> str:
        bounds = f"95% CI {self.low:.3f}..{self.high:.3f}" if self.is_known else "no CI"
        return f"{self.mean:.3f} ({bounds}, {self.size})"

    @property
    def is_known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low)

    @property
    def size(self) -> str:
        """The sample size as text, with the number of clusters if values are clustered."""
        clusters = "" if self.clusters is None else f" in {plural(self.clusters, 'cluster')}"
        return f"n={self.n}{clusters}"


def clustered_interval(
    values: Mapping[str, float], clusters: Mapping[str, str], lowest: float = 0.0
) -> Interval:
    """Return the mean reward over tasks with its 95 % confidence interval.

    Args:
        values: task id → reward.
        clusters: task id → cluster; a task without an entry is a cluster of its own. Empty if the
            tasks are independent.
        lowest: lowest reward of the run so far; 0 if none was negative.
    """
    distinct = set(values.values())
    n, possible = len(values), _range({*distinct, lowest})
    if not clusters and len(distinct) == 2 and (distinct == {*possible} or n >= MIN_SHARE_TASKS):
        low, high = sorted(distinct)
        mean = math.fsum(values.values()) / n
        count, width = sum(value == high for value in values.values()), high - low
        below, above = _share_above(count, n), _share_above(n - count, n)
        return Interval(mean, low + below * width, high - above * width, n)
    return _t_interval(values, clusters, *possible)


def paired_gain(
    before: Mapping[str, float],
    after: Mapping[str, float],
    clusters: Mapping[str, str] | None = None,
    lowest: float = 0.0,
) -> Interval:
    """Return the mean gain from `before` to `after` on tasks scored in both, with its interval.

    The gain is computed for each task, so that differences between easy and hard tasks do not widen
    the interval.

    Args:
        before: task id → reward in the earlier evaluation.
        after: task id → reward in the later evaluation.
        clusters: task id → cluster (see `clustered_interval`); None or empty if the tasks are
            independent.
        lowest: lowest reward of the run so far; 0 if none was negative.
    """
    gains = {key: after[key] - before[key] for key in sorted(before.keys() & after.keys())}
    least, most = _range({*before.values(), *after.values(), lowest})
    return _t_interval(gains, clusters or {}, least - most, most - least)


def _range(rewards: Collection[float]) -> tuple[float, float]:
    """Return the smallest and the largest reward that are possible, judged by `rewards`.

    They are 0 and 1, or -1 and 1 if a reward is negative. If a reward is below -1 or above 1, they
    are infinite.
    """
    if all(-1 <= reward <= 1 for reward in rewards):
        return (-1.0 if any(reward < 0 for reward in rewards) else 0.0), 1.0
    return -math.inf, math.inf


def _t_interval(
    values: Mapping[str, float], clusters: Mapping[str, str], least: float, most: float
) -> Interval:
    """Return the mean with its 95 % confidence interval by Student's t over clusters.

    If the means of all clusters are equal, the variance is 0, although clusters with other means
    may exist. The interval then allows for the largest share of such clusters that a sample may
    miss by chance. All values are from `least` to `most`, which may be infinite.
    """
    members: dict[Hashable, list[float]] = {}
    for task in sorted(values):
        # A tuple as the key of an independent task cannot equal a cluster of the same name.
        members.setdefault(clusters.get(task, (task,)), []).append(values[task])
    sums = [(math.fsum(group), len(group)) for group in members.values()]
    n, count = len(values), len(sums)
    total = math.fsum(value for value, _ in sums)
    mean = total / n if n else math.nan
    if count < 2:
        return Interval(mean, math.nan, math.nan, n, count if clusters else None)
    others = [(total - value) / (n - size) for value, size in sums]
    error = math.sqrt((count - 1) / count * math.fsum((other - mean) ** 2 for other in others))
    # one large cluster among small ones counts little more than alone (Kish's effective number)
    effective = math.ceil(n**2 / sum(size**2 for _, size in sums))
    low, high = (mean + sign * t_quantile(effective - 1) * error for sign in (-1, 1))
    low, high = max(low, least), min(high, most)
    if error <= 1e-9:
        share = 1 - TAIL ** (1 / count)
        low, high = mean - share * (mean - least), mean + share * (most - mean)
    return Interval(mean, low, high, n, count if clusters else None)


def _share_above(count: int, n: int) -> float:
    """Return the share that makes `count` or more successes in `n` tries improbable (`TAIL`)."""
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)]
    low, high = 0.0, 1.0
    for _ in range(40 if count else 0):
        share = (low + high) / 2
        odds = math.log(share / (1 - share))
        terms = (math.exp(logs[k] + k * odds + n * math.log1p(-share)) for k in range(count, n + 1))
        low, high = (share, high) if math.fsum(terms) < TAIL else (low, share)
    return low


def t_quantile(df: int) -> float:
    """Return the 97.5 % quantile of Student's t with `df` degrees of freedom, within 0.2 %.

    From 10 degrees it is the expansion 26.7.5 of Abramowitz and Stegun.
    """
    if df <= len(_T_QUANTILES):
        return _T_QUANTILES[df - 1]
    return Z + (Z**3 + Z) / (4 * df) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * df**2)


_T_QUANTILES: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
