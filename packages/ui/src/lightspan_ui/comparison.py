"""Compare runs: their settings, and their last held-out evaluations paired by task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec

from lightspan.errors import LightspanError
from lightspan.progress import plural
from lightspan.training.results import Evaluation
from lightspan.training.statistics import Interval, paired_gain
from lightspan_ui import views
from lightspan_ui.runs import Run, estimate, flat_settings

_ALWAYS_DIFFERENT = ("run_id",)


def comparison(runs: Sequence[Run], summaries: Sequence[views.RunSummary]) -> views.Comparison:
    """Return the comparison of runs.

    Args:
        runs: the runs.
        summaries: their summaries, in the same order.
    """
    settings = {}
    for run in runs:
        try:
            settings[run.name] = flat_settings(run.folder.read_config())
        except LightspanError:  # its summary has the error
            settings[run.name] = {}
    return views.Comparison(
        runs=list(summaries),
        settings=list(differences(settings)),
        pairs=pairs_of(runs),
    )


def pairs_of(runs: Sequence[Run]) -> list[views.PairDifference]:
    """Return the differences of all pairs of runs. If there are several, each says so."""
    pairs = [pair(first, second) for first, second in combinations(runs, 2)]
    if len(pairs) < 2:
        return pairs
    note = (
        f"{len(pairs)} pairs are compared, and their intervals are not corrected for that: each "
        "has a chance of 5 % to miss"
    )
    return [
        msgspec.structs.replace(each, sentence=f"{each.sentence}. {note}")
        if each.difference is not None
        else each
        for each in pairs
    ]


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
        sentence=". ".join(
            filter(
                None,
                [
                    sentence(first.name, second.name, difference),
                    shared_text(first, second),
                    start_text(first, second),
                ],
            )
        ),
    )


def shared_text(first: Run, second: Run) -> str:
    """Return over how many tasks two runs are compared; empty if over none."""
    if not first.evaluations or not second.evaluations:
        return ""
    before, after = first.evaluations[-1], second.evaluations[-1]
    shared = len(before.rewards.keys() & after.rewards.keys())
    if not shared:
        return ""
    sizes = [(run.name, _size(run.evaluations[-1])) for run in (first, second)]
    if all(size == shared for _, size in sizes):
        return f"Compared on {plural(shared, 'task')}: all of both runs"
    parts = " and ".join(f"{shared} of {size} of {name}" for name, size in sizes)
    return f"Compared only on the tasks that both scored: {parts}"


def _size(evaluation: Evaluation) -> int:
    return len(evaluation.rewards) + evaluation.unscored


def start_text(first: Run, second: Run) -> str:
    """Return that two runs began with different rewards; empty unless that is more than chance."""
    runs = (first, second)
    starts = [[each for each in run.evaluations if each.step == 0] for run in runs]
    if any(len(run.evaluations) == len(start) for run, start in zip(runs, starts, strict=True)):
        return ""  # there is no start, or no later evaluation
    difference = difference_of(*starts)
    if difference is None or not difference.is_known or difference.low <= 0 <= difference.high:
        return ""
    return (
        f"The runs began with different rewards: {second.name} minus {first.name} was "
        f"{difference} before training, so their last rewards do not compare the trainings alone"
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
    """Describe a difference in words, and whether it is more than chance."""
    if difference is None:
        return f"{first} and {second} have no held-out task in common that both scored"
    if not difference.is_known:
        return f"{first} and {second} share {difference.size}: too few to compare"
    mean = abs(difference.mean)
    better, worse = (second, first) if difference.mean > 0 else (first, second)
    if difference.low <= 0 <= difference.high:
        return f"no difference that can be told from chance: {second} minus {first} is {difference}"
    return f"{better} is better than {worse} by {mean:.3f}: {second} minus {first} is {difference}"
