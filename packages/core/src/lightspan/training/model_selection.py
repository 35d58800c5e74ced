"""Model selection: choose the best step and stop early.

Steps are compared on a selection split: tasks that are neither trained on nor reported. The highest
of several scores is biased upwards. Therefore the reported reward is measured on the held-out
tasks, which had no part in the choice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lightspan.algorithms.protocol import Algorithm
from lightspan.errors import ConfigError, DataError
from lightspan.progress import plural
from lightspan.schema.records import Json, fingerprint, task_id
from lightspan.schema.validation import is_number
from lightspan.training.data import check_ids, clusters_of, load_distinct
from lightspan.training.results import Evaluation
from lightspan.training.settings import TrainerSettings

SelectionData = Iterable[Json] | str | Path | float


class BestSoFar(NamedTuple):
    """The best evaluation on the selection split so far."""

    best: Evaluation | None
    """The first evaluation with the highest mean; None if no evaluation has a scored task."""
    since_best: int
    """Number of evaluations after `best`; the number of all evaluations if `best` is None."""
    evaluated: int
    """Number of all evaluations."""

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation]) -> BestSoFar:
        """Return the best of `evaluations`, which must be ordered by step."""
        best: Evaluation | None = None
        since_best = 0
        for evaluation in evaluations:
            since_best += 1
            before = None if best is None else best.restated(evaluation.failure_reward)
            is_best = before is None or evaluation.mean > before.mean
            if is_best and math.isfinite(evaluation.mean):
                best, since_best = evaluation, 0
        return cls(best, since_best, len(evaluations))


class Splits(NamedTuple):
    """The tasks of a run, by split; None for a split that the run does not have."""

    train: Sequence[Json]
    selection: Sequence[Json] | None
    held_out: Sequence[Json] | None


def split_tasks(
    settings: TrainerSettings,
    train: list[Json],
    held_out: list[Json] | None,
    selection: SelectionData | None,
) -> Splits:
    """Validate the tasks of a run, and split the selection tasks off `train` if needed.

    Args:
        settings: settings of the trainer.
        train: training tasks.
        held_out: held-out tasks; None for none.
        selection: selection tasks, or the share of `train` to use as selection tasks, drawn by the
            algorithm's seed; None for no selection split.

    Raises:
        ConfigError: the selection split is needed and missing, or would never be evaluated; or
            the share is not between 0 and 1.
        DataError: a selection task is a held-out task too, the share leaves no training task, or a
            held-out or selection task has no cluster (`Trainer(cluster=)`).
    """
    clusters_of(held_out or (), settings.cluster, "val")
    if selection is None:
        if settings.selection_setting:
            raise ConfigError(
                f"{settings.selection_setting} compares steps, by tasks that are neither trained "
                "on nor reported: give fit(…, selection=tasks), or selection=0.1 for a tenth of "
                "train"
            )
        return Splits(train, None, held_out)
    if settings.validate_every is None or settings.algorithm.total_steps == 1:
        raise ConfigError(
            "selection= is evaluated between steps: give Trainer(validate_every=) too, such as a "
            "tenth of the steps, or leave it out, as with GEPA and APO: they have one step, and "
            "compare prompts on a share of train of their own, GEPA(selection=0.5)"
        )
    if isinstance(selection, int | float):
        train, tasks = _split_off(train, selection, settings.algorithm.seed)
    else:
        tasks = load_distinct(selection, "selection")
    shared = sorted(set(map(task_id, tasks)) & set(map(task_id, held_out or ())))
    if shared:
        raise DataError(
            f"{len(shared)} of {len(tasks)} tasks of selection are held out too (for example "
            f"{shared[0]}): the result on tasks that chose the step would be too high. Make the "
            "two differ"
        )
    clusters_of(tasks, settings.cluster, "selection")
    return Splits(train, tasks, held_out)


def overlap_warnings(algorithm: Algorithm, splits: Splits) -> Iterator[str]:
    """Yield warnings about tasks that occur more than once: in training, or in two splits.

    Tasks of two splits are equal if all fields but `id` are; training tasks, if `id` is too.
    """
    train = set(map(_content, splits.train))
    distinct = len(set(map(fingerprint, splits.train)))  # with their ids, which apps may look up
    if distinct < len(splits.train):
        yield f"of {len(splits.train)} training tasks {distinct} are distinct: others repeat them"
    selection, held_out = splits.selection or (), splits.held_out or ()
    if shared := sum(_content(task) in train for task in selection):
        yield (
            f"{shared} of the {plural(len(selection), 'task')} of selection are trained on too: "
            "the best step may be the one that knows them by heart"
        )
    why = "the weights may know them by heart"
    if algorithm.searches or not algorithm.policies():
        why = "prompts may be chosen by them and contain their answers"
    if shared := sum(_content(task) in train for task in held_out):
        yield (
            f"{shared} of the {plural(len(held_out), 'held-out task')} are training tasks too: "
            f"{why}, so the reported reward is too high; give other held-out tasks"
        )


def _content(task: Json) -> str:
    """Return a hash of the fields of a task other than `id`.

    If the task has no other field, it is a hash of the whole task.
    """
    content = {k: v for k, v in task.items() if k != "id"} if isinstance(task, dict) else task
    return fingerprint(content or task)


def _split_off(train: list[Json], share: float, seed: int) -> tuple[list[Json], list[Json]]:
    """Split selection tasks off at random; return (remaining training tasks, selection tasks).

    If a task is selected, all tasks equal to it leave the training tasks too, and one of them
    becomes a selection task.

    Args:
        train: training tasks.
        share: share of the distinct tasks to select, between 0 and 1.
        seed: seed of the random choice.

    Raises:
        ConfigError: `share` is not between 0 and 1.
        DataError: no training task would remain, or tasks that differ share an id.
    """
    if not is_number(share) or not 0 < share < 1:
        raise ConfigError(f"selection={share!r}: the share of train to take is between 0 and 1")
    check_ids(train, "train", may_repeat=True)
    distinct = {task_id(task): task for task in train}
    count = max(1, round(share * len(distinct)))
    if count >= len(distinct):
        raise DataError(
            f"selection={share!r} of {len(distinct)} distinct training tasks leaves none to train "
            "on: give more tasks, or a smaller share"
        )
    names = random.Random(f"{seed}/selection").sample(list(distinct), count)
    chosen = set(names)
    return [task for task in train if task_id(task) not in chosen], [distinct[n] for n in names]
