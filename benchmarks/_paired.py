"""Gains of many arms over one control, paired by seed and task, with a joint correction.

    blocks = {"sql": Block(runs, "terminal", clusters), ...}
    family = Family(blocks, [[("sql", "discounted")], ..., [("sql", "anchor"), ("rag", "anchor")]])
    for judged in family.judge(): print(judged.mean, judged.low, judged.high, judged.p)

**Pairs.** All arms of a seed begin with the same weights and are evaluated on the same tasks. A
block is a task of the comparison: arms by seeds, each cell the mean reward of a run. A held-out
task that one arm of a seed left unscored is left out of that seed, in every arm.

**Error of a gain.** Two things vary: seeds, and the clusters that held-out tasks are in.

- Seeds: with y the means and r = y - (mean of the arm) - (mean of the seed) + (mean of all), the
  variance of a run is s² = Σ r² / ((arms - 1)(seeds - 1)), and that of a gain 2 s² / seeds: the
  randomised block design, which assumes that the arms of a block are equally noisy. With one arm
  and the control, it is the paired t test.
- Clusters: V(clusters) - V(seeds x clusters), if that is positive. Each V is C/(C-1) · Σ u² / n²,
  where u is the sum, over a cluster (over a cluster in a seed), of the deviations of its paired
  differences from their mean, and n is the number of all differences. Together with the variance
  of seeds this is the variance clustered two ways (Cameron, Gelbach and Miller 2011).

**Correction.** All contrasts are one family. An interval is mean ± c · error, where c is the 95 %
quantile of the largest |t| of the family if no arm differs from its control. It is simulated:
20,000 tables of normal numbers with the same shape (and the measured spread of each block) go
through the same formulas. With one block this is Dunnett's test; with one contrast, Student's. The
intervals are simultaneous: in 95 of 100 comparisons all of them cover the true values. A contrast's
p is the share of draws whose largest |t| is at least its own, so p < .05 if its interval excludes
0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

DRAWS: Final = 20_000
LEVEL: Final = 0.95

Rewards = Mapping[str, float]
"""Held-out task → reward, without tasks that have no score."""
Contrast = Sequence[tuple[str, str]]
"""The (block, arm) pairs whose mean gain is tested."""


class Estimate(NamedTuple):
    """A gain and its standard error."""

    mean: float
    error: float

    @property
    def t(self) -> float:
        """The gain divided by its standard error; 0 if the gain is 0."""
        if self.error:
            return self.mean / self.error
        return math.copysign(math.inf, self.mean) if self.mean else 0.0


class Judged(NamedTuple):
    """A gain with its interval and p, corrected for all contrasts of the family."""

    contrast: Contrast
    mean: float
    error: float
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "not told from chance"


class Block:
    """One task of the comparison: the rewards of all arms and seeds.

    Args:
        runs: arm → for each seed, in the same order, the rewards of the held-out tasks.
        control: the arm with which the others are compared.
        clusters: held-out task → its cluster; a task without an entry is a cluster of its own. None
            for no clusters.

    Raises:
        ValueError: there are fewer than two arms or seeds, arms have different numbers of seeds, or
            in some seed no task was scored by all arms.
    """

    def __init__(
        self,
        runs: Mapping[str, Sequence[Rewards]],
        control: str,
        clusters: Mapping[str, str] | None = None,
    ) -> None:
        sizes = {len(found) for found in runs.values()}
        if len(runs) < 2 or len(sizes) != 1 or min(sizes) < 2:
            counts = {arm: len(found) for arm, found in runs.items()}
            raise ValueError(f"two arms and two seeds at least, as many of each arm: {counts}")
        [self.seeds] = sizes
        self.control = control
        self.arms = [arm for arm in runs if arm != control]
        self._clusters = clusters or {}
        self._runs = self._complete(runs)
        self.left_out = sum(
            len(set().union(*map(set, of_seed))) - len(shared)
            for of_seed, shared in zip(zip(*runs.values(), strict=True), self._shared, strict=True)
        )
        """Number of held-out tasks, over all seeds, that are scored in some arm but not in all."""

    def _complete(self, runs: Mapping[str, Sequence[Rewards]]) -> dict[str, list[dict[str, float]]]:
        self._shared = [
            sorted(set.intersection(*(set(rewards) for rewards in of_seed)))
            for of_seed in zip(*runs.values(), strict=True)
        ]
        if not all(self._shared):
            raise ValueError("no held-out task of a seed was scored by all arms")
        return {
            arm: [
                {task: rewards[task] for task in shared}
                for rewards, shared in zip(found, self._shared, strict=True)
            ]
            for arm, found in runs.items()
        }

    @cached_property
    def means(self) -> dict[str, list[float]]:
        """Arm → the mean reward of each seed."""
        return {
            arm: [math.fsum(rewards.values()) / len(rewards) for rewards in found]
            for arm, found in self._runs.items()
        }

    def differences(self, arm: str) -> list[float]:
        """Return the gain over the control of each seed."""
        pairs = zip(self.means[arm], self.means[self.control], strict=True)
        return [mean - base for mean, base in pairs]

    @cached_property
    def spread(self) -> float:
        """The standard deviation of a run's mean reward that neither arm nor seed explains."""
        table = np.array([self.means[self.control], *(self.means[arm] for arm in self.arms)])
        return float(_spread(table))

    def gain(self, arm: str) -> Estimate:
        """Return an arm's mean gain; its error covers the variation of seeds and of clusters."""
        found = self.differences(arm)
        variance = 2 * self.spread**2 / self.seeds + self._of_clusters(arm)
        return Estimate(math.fsum(found) / self.seeds, math.sqrt(variance))

    def _of_clusters(self, arm: str) -> float:
        pairs = [
            (self._clusters.get(task, (task,)), seed, more - self._runs[self.control][seed][task])
            for seed, rewards in enumerate(self._runs[arm])
            for task, more in rewards.items()
        ]
        mean = math.fsum(value for *_, value in pairs) / len(pairs)
        one: dict[Any, list[float]] = {}
        both: dict[Any, list[float]] = {}
        for cluster, seed, value in pairs:
            one.setdefault(cluster, []).append(value - mean)
            both.setdefault((cluster, seed), []).append(value - mean)
        return max(0.0, _clustered(one.values()) - _clustered(both.values()))


class Family:
    """Contrasts that are corrected for multiple comparisons together.

    Raises:
        ValueError: a contrast names an unknown block or arm.
    """

    def __init__(
        self, blocks: Mapping[str, Block], contrasts: Sequence[Contrast], *, draws: int = DRAWS
    ) -> None:
        for name, arm in (part for contrast in contrasts for part in contrast):
            if name not in blocks or arm not in blocks[name].arms:
                raise ValueError(f"no gain of {arm} in {name}")
        self._blocks = blocks
        self._contrasts = contrasts
        self._largest = np.sort(self._draw(draws))

    @property
    def size(self) -> int:
        """Number of contrasts."""
        return len(self._contrasts)

    @property
    def critical(self) -> float:
        """The smallest |t| with which a gain is significant at 5 %."""
        place = math.ceil(LEVEL * len(self._largest)) - 1
        return float(self._largest[place])

    def judge(self) -> list[Judged]:
        """Return the result of each contrast, in order."""
        return [self._judged(contrast) for contrast in self._contrasts]

    def _judged(self, contrast: Contrast) -> Judged:
        parts = [self._blocks[name].gain(arm) for name, arm in contrast]
        mean = math.fsum(part.mean for part in parts) / len(parts)
        error = math.sqrt(math.fsum(part.error**2 for part in parts)) / len(parts)
        half = self.critical * error
        above = len(self._largest) - bisect_left(self._largest, abs(Estimate(mean, error).t))
        p = (above + 1) / (len(self._largest) + 1)
        return Judged(contrast, mean, error, mean - half, mean + half, p)

    def _draw(self, draws: int) -> Any:
        """Return [draws] the largest |t| of the family, simulated without any true difference."""
        rng = np.random.default_rng(0)  # the same figures have the same intervals
        means: dict[tuple[str, str], Any] = {}
        errors: dict[str, Any] = {}
        for name, block in self._blocks.items():
            shape = (draws, 1 + len(block.arms), block.seeds)
            table = rng.standard_normal(shape) * (block.spread or 1.0)
            errors[name] = 2 * _spread(table) ** 2 / block.seeds
            gains = (table[:, 1:] - table[:, :1]).mean(-1)
            means |= {(name, arm): gains[:, place] for place, arm in enumerate(block.arms)}
        largest = np.zeros(draws)
        for contrast in self._contrasts:
            total = sum(means[part] for part in contrast)
            error = np.sqrt(sum(errors[name] for name, _ in contrast))
            largest = np.maximum(largest, np.abs(total / error))
        return largest


def _spread(table: Any) -> Any:
    """Return the standard deviation of the residuals after row and column means.

    The last two axes of `table` are arms and seeds.
    """
    arms, seeds = table.shape[-2:]
    rows, columns = table.mean(-1, keepdims=True), table.mean(-2, keepdims=True)
    rest = table - rows - columns + table.mean((-2, -1), keepdims=True)
    return np.sqrt((rest**2).sum((-2, -1)) / ((arms - 1) * (seeds - 1)))


def _clustered(groups: Iterable[Sequence[float]]) -> float:
    """Return the variance of a mean, from the differences to it in each cluster."""
    groups = list(groups)
    if len(groups) < 2:
        return 0.0
    count = sum(map(len, groups))
    squares = math.fsum(math.fsum(group) ** 2 for group in groups)
    return len(groups) / (len(groups) - 1) * squares / count**2
