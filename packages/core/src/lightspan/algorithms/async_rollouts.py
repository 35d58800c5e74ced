"""Overlap: groups of rollouts go on while weights update, and are trained before they are old."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightspan.algorithms.protocol import Metrics, TrainerContext
from lightspan.errors import UnsupportedError
from lightspan.lightning.episode import Episode
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LoRA


async def next_episodes(
    world: TrainerContext, overlap: int, per_step: int, group_size: int
) -> tuple[list[Episode], Metrics]:
    """Return the episodes of a step, and how old its groups were; new groups take their places.

    At most `overlap + 1` steps' worth of groups are in flight. A group may be trained until
    `overlap` publications have followed its submission. No step leaves more groups of a deadline
    than the steps until then can train, and for the oldest of those it waits; beyond these, what
    ended first comes first.

    Args:
        overlap: publications that may lie between the submission of a group and its training.
        per_step: groups that a step trains.
    """
    remaining = (world.last_step - world.step + 1) * per_step
    missing = min((overlap + 1) * per_step, remaining) - len(world.in_flight)
    if missing > 0:
        await world.submit(world.next_tasks(missing), group_size)
    ages = dict(world.in_flight)
    due = due_groups([overlap - age for age in ages.values()], per_step)
    episodes = await world.take(min(per_step, len(ages)), [*ages][:due])
    behind = [ages[group] for group in dict.fromkeys(each.group_id for each in episodes)]
    return episodes, {
        "overlap/behind": sum(behind) / len(behind) if behind else 0.0,
        "overlap/behind_max": max(behind, default=0),
        "overlap/in_flight": len(ages) - len(behind),
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
