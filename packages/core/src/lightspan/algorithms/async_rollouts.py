"""Asynchronous rollouts: groups run while weights update, with bounded staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightspan.algorithms.protocol import Metrics, TrainerContext
from lightspan.errors import UnsupportedError
from lightspan.lightning.episode import Episode
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LoRA


async def next_episodes(
    trainer: TrainerContext, overlap: int, per_step: int, group_size: int
) -> tuple[list[Episode], Metrics]:
    """Return the episodes of a step with metrics of their age, and submit new groups.

    At most `overlap + 1` steps' worth of groups are in flight. The step waits for the oldest groups
    that later steps could not train in time, and fills up with the groups that ended first.

    Args:
        overlap: maximum publications between the submission of a group and its training.
        per_step: groups per step.
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


def check_overlap(
    overlap: int, engine: EngineCapabilities, adapters: Sequence[LoRA | None]
) -> None:
    """Raise `UnsupportedError` if calls and updates cannot run concurrently.

    In one process, dropout and sampling use the same random state. A learner that rewinds it, to
    repeat a dropout mask, would make the engine sample from used random numbers.
    """
    if overlap and not engine.in_place_update:
        raise UnsupportedError(
            f"overlap={overlap}: the engine cannot update weights while calls are running: use "
            "overlap=0 or another engine"
        )
    if overlap and (dropping := [lora for lora in adapters if lora and lora.dropout]):
        raise UnsupportedError(
            f"overlap={overlap} with LoRA(dropout={dropping[0].dropout:g}): dropout and sampling "
            "would use one random state at the same time; use dropout=0 or overlap=0"
        )


def due_groups(steps_left: Sequence[int], per_step: int) -> int:
    """Return how many groups, the oldest first, this step has to train so that all are in time.

    Args:
        steps_left: per group, the number of steps after this one that may still train it, 0 if this
            is the last one; ascending.
        per_step: groups per step.

    Returns:
        The largest excess, over n = 0, 1, …, of the groups with at most n steps left over the
        `n * per_step` that the n steps after this one can train; 0 if there is none.
    """
    until, due = 0, 0
    for steps, groups in sorted(Counter(steps_left).items()):
        until += groups
        due = max(due, until - max(0, steps) * per_step)
    return due
