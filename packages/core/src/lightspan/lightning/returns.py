"""Returns: the total reward of a rollout, the raw material of statistics.

A return is the final reward plus, where the credit rule pays for them, the rewards on calls, each
once and undiscounted, and the bonuses of AIR. Rewards without a place (`PlacedRewards`) are left
out, because no call is credited with them: a group that differs by them alone has nothing to learn.
Potentials and length penalties are not rewards, so they are left out too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from lightspan.lightning.credit import final_reward, placed_rewards
from lightspan.lightning.episode import Episode
from lightspan.lightning.selection import Coverage


def return_of(episode: Episode, coverage: Coverage, bonus: float = 0.0) -> float:
    """Return the total reward of a scored rollout.

    Args:
        coverage: its `step_rewards` decides whether rewards on calls count.
        bonus: sum of AIR's bonuses.
    """
    rewards = [final_reward(episode), bonus]
    if coverage.step_rewards:
        placed = placed_rewards(episode, coverage.turns)
        rewards += chain.from_iterable([*placed.own, *placed.shared])
    return math.fsum(rewards)


def group_rewards(
    episodes: Sequence[Episode],
    coverages: Sequence[Coverage],
    bonuses: Mapping[str, float] | None = None,
) -> dict[str, list[float | None]]:
    """Return group → returns, None for each rollout that statistics leave out.

    Args:
        coverages: one per episode.
        bonuses: attempt → sum of AIR's bonuses (`lightspan.lightning.air.bonuses`).
    """
    bonuses = bonuses or {}
    returns: dict[str, list[float | None]] = defaultdict(list)
    for episode, coverage in zip(episodes, coverages, strict=True):
        scored = episode.scored(coverage.step_rewards)
        counts = episode.finished and not episode.capture_errors and scored
        bonus = bonuses.get(episode.attempt_id, 0.0)
        returns[episode.group_id].append(return_of(episode, coverage, bonus) if counts else None)
    return dict(returns)
