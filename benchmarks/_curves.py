"""Learning curves of several seeds: their mean, its intervals, and a picture of them.

air = Arm("with AIR", [[(0, 0.6), (10, 0.85), (20, 0.88)], ...])     one list for each seed
draw([plain, air], Path("curve.png"), title="SQL", metric="execution accuracy")
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from lightspan.training.statistics import Interval, paired_gain, t_quantile

RESAMPLES: Final = 2000
COLOURS: Final = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")

Curve = Sequence[tuple[int, float]]
"""(step, held-out mean) of one seed at each evaluation."""


class Arm(NamedTuple):
    """The learning curves of one way to train."""

    name: str
    curves: Sequence[Curve]
    """One curve for each seed, with the same steps."""


def seed_interval(values: Sequence[float]) -> Interval:
    """Return the mean over seeds, with its 95 % interval by Student's t; infinite for one seed."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def crossed_interval(
    of_seed: Sequence[Mapping[str, float]], clusters: Mapping[str, str]
) -> Interval:
    """Return the mean over seeds and tasks, with a 95 % interval for the variation of both.

    It is a bootstrap: seeds are drawn with replacement, then clusters of tasks, which are the same
    for every drawn seed. A cluster that is hard for one seed is hard for all seeds, because all are
    measured on the same tasks (the pigeonhole bootstrap, Owen 2007, Annals of Applied Statistics
    1(2)). With one seed it is Student's t over clusters (`paired_gain`). The variation of seeds is
    underestimated if there are only three: report `seed_interval` too.

    Args:
        of_seed: for each seed, task → value.
        clusters: task → its cluster; a task without an entry is a cluster of its own.
    """
    if len(of_seed) == 1:
        return paired_gain(dict.fromkeys(of_seed[0], 0.0), of_seed[0], clusters)
    names: dict[object, None] = {}
    sums: list[dict[object, tuple[float, int]]] = []
    for values in of_seed:
        groups: dict[object, list[float]] = {}
        for task in sorted(values):
            groups.setdefault(clusters.get(task, (task,)), []).append(values[task])
        names.update(dict.fromkeys(groups))
        sums.append({name: (math.fsum(group), len(group)) for name, group in groups.items()})
    every = list(names)
    rng = random.Random(0)
    means = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(sums, k=len(sums))
        chosen = rng.choices(every, k=len(every))
        parts = [seed.get(name, (0.0, 0)) for seed in drawn for name in chosen]
        size = sum(count for _, count in parts)
        means += [math.fsum(total for total, _ in parts) / size] if size else []
    whole = [value for values in of_seed for value in values.values()]
    means.sort()
    low, high = (means[round(share * len(means)) - 1] for share in (0.025, 0.975))
    return Interval(math.fsum(whole) / len(whole), low, high, len(whole), len(every))


def steps_of(arm: Arm) -> list[tuple[int, Interval]]:
    """Return each step, with the mean over seeds and its interval.

    Raises:
        ValueError: the seeds were not evaluated at the same steps.
    """
    steps = [[step for step, _ in curve] for curve in arm.curves]
    if any(each != steps[0] for each in steps):
        raise ValueError(f"{arm.name}: the seeds were evaluated at different steps: {steps}")
    means = zip(*([mean for _, mean in curve] for curve in arm.curves), strict=True)
    return [(step, seed_interval(values)) for step, values in zip(steps[0], means, strict=True)]


def draw(arms: Sequence[Arm], path: Path, *, title: str, metric: str) -> None:
    """Write a PNG with each arm's mean, its interval over seeds, and each seed as a thin line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    for arm, colour in zip(arms, COLOURS, strict=False):
        points = steps_of(arm)
        steps, means = [step for step, _ in points], [found.mean for _, found in points]
        for curve in arm.curves:
            axes.plot(steps, [mean for _, mean in curve], color=colour, linewidth=0.6, alpha=0.4)
        if len(arm.curves) > 1:
            low, high = [found.low for _, found in points], [found.high for _, found in points]
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        seeds = f"{len(arm.curves)} seed{'s' if len(arm.curves) > 1 else ''}"
        axes.plot(steps, means, "o-", color=colour, linewidth=2, label=f"{arm.name} ({seeds})")
    axes.set_xlabel("training step")
    axes.set_ylabel(f"{metric} on questions not trained on")
    axes.set_title(title, fontsize=11)
    axes.grid(visible=True, alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
