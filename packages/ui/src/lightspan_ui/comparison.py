"""Compare runs: their settings, and their last held-out evaluations paired by task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from lightspan.errors import LightspanError
from lightspan.training.results import Evaluation
from lightspan.training.statistics import Interval, paired_gain
from lightspan_ui import views
from lightspan_ui.runs import Run, estimate, flat_settings

_ALWAYS_DIFFERENT = ("run_id",)


def comparison(runs: Sequence[Run], summaries: Sequence[views.RunSummary]) -> views.Comparison:
    """Return runs beside each other.

    Args:
        runs: the runs.
        summaries: their summaries, in the same order.
    """
    settings = {}
    for run in runs:
        try:
            settings[run.name] = flat_settings(run.folder.read_config())
        except LightspanError:  # its summary tells what is wrong
            settings[run.name] = {}
    return views.Comparison(
        runs=list(summaries),
        settings=list(differences(settings)),
        pairs=[pair(first, second) for first, second in combinations(runs, 2)],
    )


def differences(settings: dict[str, dict[str, str]]) -> Iterator[views.SettingDifference]:
    """Yield the settings that are not equal in all runs.

    Args:
        settings: run → name of a setting → value.
    """
    names = dict.fromkeys(name for each in settings.values() for name in each)
    for name in names:
        values = {run: each[name] for run, each in settings.items() if name in each}
        is_equal = len(values) == len(settings) and len(set(values.values())) == 1
        if not is_equal and name not in _ALWAYS_DIFFERENT:
            yield views.SettingDifference(name=name, values=values)


def pair(first: Run, second: Run) -> views.PairDifference:
    """Return the difference of the last held-out evaluations of two runs."""
    difference = difference_of(first.evaluations, second.evaluations)
    return views.PairDifference(
        first=first.name,
        second=second.name,
        difference=None if difference is None else estimate(difference),
        sentence=sentence(first.name, second.name, difference),
    )


def difference_of(first: Sequence[Evaluation], second: Sequence[Evaluation]) -> Interval | None:
    """Return the mean difference of rewards on the tasks that both last evaluations scored.

    None if there are none.
    """
    if not first or not second:
        return None
    before, after = first[-1], second[-1]
    lowest = min(before.lowest_reward, after.lowest_reward)
    clusters = {**before.clusters, **after.clusters}
    interval = paired_gain(before.rewards, after.rewards, clusters, lowest)
    return interval if interval.n else None


def sentence(first: str, second: str, difference: Interval | None) -> str:
    """Describe a difference in words, and whether it can be told from chance."""
    if difference is None:
        return f"{first} and {second} have no held-out task in common that both scored"
    if not difference.is_known:
        return f"{first} and {second} share {difference.size}: too few to compare"
    mean = abs(difference.mean)
    better, worse = (second, first) if difference.mean > 0 else (first, second)
    if difference.low <= 0 <= difference.high:
        return f"no difference that can be told from chance: {second} minus {first} is {difference}"
    return f"{better} is better than {worse} by {mean:.3f}: {second} minus {first} is {difference}"
