"""The best step: which weights of a run are kept, and when it stops early.

Steps are looked at by a selection split: tasks that are neither trained on nor reported. The
highest of several scores is high partly by luck, so the score that a step was chosen by is never
its result: that is its reward on the held-out tasks, which had no part in the choice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from lightspan.algorithms.protocol import Algorithm
from lightspan.errors import ConfigError, DataError
from lightspan.progress import plural
from lightspan.schema.records import Json
from lightspan.schema.validation import is_number
from lightspan.training.data import clusters_of, load_distinct, task_id
from lightspan.training.results import Evaluation
from lightspan.training.settings import TrainerSettings

SelectionData = Iterable[Json] | str | Path | float


class BestSoFar(NamedTuple):
    """How the evaluations on the selection split stand."""

    best: Evaluation | None
    """The first with the highest mean; None while none scored a task."""
    waited: int
    """Evaluations since then."""
    evaluated: int
    """Steps in all."""

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation]) -> BestSoFar:
        """That of these evaluations, in the order of their steps."""
        best: Evaluation | None = None
        waited = 0
        for found in evaluations:
            mean = found.mean
            waited += 1
            if math.isfinite(mean) and (best is None or mean > best.mean):
                best, waited = found, 0
        return cls(best, waited, len(evaluations))


class Splits(NamedTuple):
    """The tasks of a run."""

    train: list[Json]
    selection: list[Json] | None
    held_out: list[Json] | None


def split_tasks(
    settings: TrainerSettings,
    train: list[Json],
    held_out: list[Json] | None,
    selection: SelectionData | None,
) -> Splits:
    """The three splits, checked.

    Args:
        selection: tasks, or the share of `train` to take for it, by the algorithm's seed.

    Raises:
        ConfigError: it is missing and a step is to be chosen, or there and never run.
        DataError: a task of it is held out too, or is in no cluster (`Trainer(cluster=)`).
    """
    chooses = settings.chooses
    if selection is None:
        if chooses:
            raise ConfigError(
                f"{chooses} compares steps, by tasks that are neither trained on nor reported: "
                "give fit(…, selection=tasks), or selection=0.1 for a tenth of train"
            )
        clusters_of(held_out or (), settings.cluster, "val")
        return Splits(train, None, held_out)
    if settings.validate_every is None:
        raise ConfigError(
            "selection= is evaluated on the way: give Trainer(validate_every=) too, such as a "
            "tenth of the steps, or leave it out"
        )
    if isinstance(selection, int | float):
        train, chosen = _taken(train, selection, settings.algorithm.seed)
    else:
        chosen = load_distinct(selection, "selection")
    _check_apart(chosen, held_out)
    clusters_of(held_out or (), settings.cluster, "val")
    clusters_of(chosen, settings.cluster, "selection")
    return Splits(train, chosen, held_out)


def overlap_warning(splits: Splits) -> str:
    """What to say of tasks of the selection split that are trained on; empty if none is."""
    shared, given = len(_ids(splits.train) & _ids(splits.selection)), len(splits.selection or ())
    if not shared:
        return ""
    return (
        f"{shared} of the {plural(given, 'task')} of selection are trained on too: the best step "
        "may be the one that knows them by heart"
    )


def describe_selection(algorithm: Algorithm, splits: Splits) -> str:
    """What to say of held-out tasks by which prompts may be chosen; empty if there is none."""
    shared, given = len(_ids(splits.train) & _ids(splits.held_out)), len(splits.held_out or ())
    if not shared or (algorithm.policies() and not algorithm.searches):
        return ""
    return (
        f"{shared} of the {plural(given, 'held-out task')} are training tasks too: prompts may be "
        "chosen by them and know their answers, so what is reported is too high; give others"
    )


def _taken(train: list[Json], share: float, seed: int) -> tuple[list[Json], list[Json]]:
    """(what is left of the training tasks, a share of them); equal tasks stay together."""
    if not is_number(share) or not 0 < share < 1:
        raise ConfigError(f"selection={share!r}: the share of train to take is between 0 and 1")
    distinct = {task_id(task): task for task in train}
    count = max(1, round(share * len(distinct)))
    if count >= len(distinct):
        raise DataError(
            f"selection={share!r} of {len(distinct)} distinct training tasks leaves none to train "
            "on: give more tasks, or a smaller share"
        )
    names = random.Random(f"{seed}/selection").sample(list(distinct), count)
    taken = set(names)
    return [task for task in train if task_id(task) not in taken], [distinct[n] for n in names]


def _check_apart(selection: Sequence[Json], held_out: Sequence[Json] | None) -> None:
    shared = sorted(_ids(selection) & _ids(held_out))
    if shared:
        raise DataError(
            f"{len(shared)} of {len(selection)} tasks of selection are held out too (for example "
            f"{shared[0]}): what a step is chosen by cannot be what is reported of it, which would "
            "be too high. Make the two differ"
        )


def _ids(tasks: Sequence[Json] | None) -> set[str]:
    return {task_id(task) for task in tasks or ()}
