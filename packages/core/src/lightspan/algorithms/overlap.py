"""Overlap: groups of rollouts go on while weights update, and are trained before they are old."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lightspan.algorithms.protocol import Metrics, World
from lightspan.engines.protocol import EngineCapabilities
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.learners.protocol import LoRA
from lightspan.lightning.episode import Episode


class InFlight:
    """The groups that a run has submitted and not trained yet.

    There are at most `overlap + 1` steps' worth of them. A group is submitted after so many
    publications of weights, and may be trained until `overlap` more have come: that is its
    deadline. No step leaves more groups of a deadline than the steps until then can train, and for
    the oldest of those it waits. Where every step publishes that is all of a step: it trains the
    groups begun longest ago, which have had `overlap` steps more than they would have had. Only
    where a step published nothing is there a choice, and what has ended first comes first.

    Args:
        overlap: publications that may lie between the beginning of a group and its training.
        per_step: groups that a step trains.
    """

    def __init__(self, overlap: int, per_step: int) -> None:
        self._overlap = overlap
        self._per_step = per_step
        self._world: Callable[[], World | None] = lambda: None
        """The run that they are of."""
        self._versions: Mapping[str, int] = {}
        """That the run served last."""
        self._published = 0
        self._begun: dict[str, int] = {}
        """Group → publications before it was submitted; in the order of submission."""
        self._behind: list[int] = []
        """Of the groups that were taken last: publications since they were submitted."""

    async def next(self, world: World, group_size: int) -> list[Episode]:
        """The episodes of a step; new groups take their places first, as many as the steps that are
        left can train."""
        if self._world() is not world:
            self._world = weakref.ref(world)
            self._versions, self._published, self._begun = dict(world.versions), 0, {}
        if self._versions != world.versions:  # every group in flight is one version older
            self._versions = dict(world.versions)
            self._published += 1
        left = (world.last_step - world.step + 1) * self._per_step
        missing = min((self._overlap + 1) * self._per_step, left) - len(self._begun)
        if missing > 0:
            groups = await world.submit(world.next_tasks(missing), group_size)
            self._begun |= dict.fromkeys(groups, self._published)
        due = due_groups(
            [begun + self._overlap - self._published for begun in self._begun.values()],
            self._per_step,
        )
        count = min(self._per_step, len(self._begun))
        episodes = await world.take(count, [*self._begun][:due])
        taken = dict.fromkeys(episode.group_id for episode in episodes if episode.group_id)
        if unknown := [group for group in taken if group not in self._begun]:
            raise ConfigError(
                f"overlap={self._overlap}: the run gave groups {unknown} that this algorithm does "
                "not know of: hand LightningRL one and the same world in all steps of a run, and "
                "leave submit and take to it"
            )
        self._behind = [self._published - self._begun.pop(group) for group in taken]
        return episodes

    def metrics(self) -> Metrics:
        """How old the groups of this step were, in publications, and how many are in flight."""
        behind = self._behind
        return {
            "overlap/behind": sum(behind) / len(behind) if behind else 0.0,
            "overlap/behind_max": max(behind, default=0),
            "overlap/in_flight": len(self._begun),
        }


def check_overlap(
    overlap: int, engine: EngineCapabilities, adapters: Sequence[LoRA | None]
) -> None:
    """Raise `UnsupportedError` where calls and updates cannot go on at the same time.

    Dropout and sampling draw from one random state where engine and learner share a process. A
    learner that winds it back, to draw the same dropout twice, would have answers sampled from
    numbers that were used before.
    """
    if overlap and not engine.in_place_update:
        raise UnsupportedError(
            f"overlap={overlap}: the engine cannot take new weights while calls are under way: use "
            "overlap=0 or another engine"
        )
    if overlap and (dropping := [lora for lora in adapters if lora and lora.dropout]):
        raise UnsupportedError(
            f"overlap={overlap} with LoRA(dropout={dropping[0].dropout:g}): what is dropped and "
            "what is sampled would be drawn from one random state at the same time; use dropout=0 "
            "or overlap=0"
        )


def due_groups(left: Sequence[int], per_step: int) -> int:
    """How many groups, the oldest first, this step has to train for all to be in time.

    Args:
        left: of each group, in order of age: steps after this one that may still train it, 0 if
            this is the last; it never falls along the sequence.
        per_step: groups that a step trains.

    Returns:
        The largest excess, over n = 0, 1, …, of the groups that have at most n steps left over the
        `n * per_step` that the n steps after this one can train; 0 if there is none.
    """
    until, due = 0, 0
    for steps, groups in sorted(Counter(left).items()):
        until += groups
        due = max(due, until - max(0, steps) * per_step)
    return due
