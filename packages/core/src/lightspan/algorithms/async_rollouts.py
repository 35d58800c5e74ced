"""Run groups of rollouts while weights are updated, up to a maximum age of each group.

A group has the rollouts of one task. Its age is the number of weight updates since its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightspan.algorithms.protocol import Metrics, TrainerContext
from lightspan.lightning.episode import Episode


async def next_episodes(
    trainer: TrainerContext, overlap: int, per_step: int, group_size: int
) -> tuple[list[Episode], Metrics]:
    """Submit new groups of rollouts, and return the episodes that this step trains, with metrics.

    At most `(overlap + 1) * per_step` groups are submitted and not yet taken. The step takes those
    of the oldest groups that would otherwise become too old (`due_groups`), then the groups that
    ended first. The metrics are the age of the taken groups, and the number of groups that are
    left.

    Args:
        trainer: the running trainer.
        overlap: maximum age of a group: the number of weight updates between its submission and its
            training.
        per_step: groups per step.
        group_size: rollouts per group.
    """
    remaining = (trainer.last_step - trainer.step + 1) * per_step
    missing = min((overlap + 1) * per_step, remaining) - len(trainer.in_flight)
    if missing > 0:
        await trainer.submit(trainer.next_tasks(missing), group_size)
    ages = dict(trainer.in_flight)
    due = due_groups([overlap - age for age in ages.values()], per_step)
    episodes = await trainer.take(min(per_step, len(ages)), [*ages][:due])
    behind = [ages[group] for group in dict.fromkeys(e.group_id for e in episodes)]
    return episodes, {
        "overlap/behind": sum(behind) / len(behind) if behind else 0.0,
        "overlap/behind_max": max(behind, default=0),
        "overlap/in_flight": len(ages) - len(behind),
    }


def due_groups(steps_left: Sequence[int], per_step: int) -> int:
    """Return how many of the oldest groups this step must train, so that none becomes too old.

    Each step trains `per_step` groups, so the `n` steps after this one train `n * per_step`. If
    more groups become too old after these steps, this step has to train the excess. The result is
    the largest excess over all `n`.

    Args:
        steps_left: for each group, the number of steps after this one that may still train it, in
            ascending order; 0 if only this step may.
        per_step: groups per step.
    """
    until, due = 0, 0
    for steps, groups in sorted(Counter(steps_left).items()):
        until += groups
        due = max(due, until - max(0, steps) * per_step)
    return due
