"""Returns: what a rollout was paid in all. Statistics are made of them: scale, and whether a group
varies.

A return is the final reward and, where the credit rule pays for them, the rewards on calls, each
once and undiscounted, and the bonuses of AIR. Rewards that have no place (`PlacedRewards`) are
nobody's credit, so they are no part of it either: a group that differs by them alone has nothing to
learn from. Neither are potentials and penalties, which are no rewards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightspan.lightning.credit import final_reward, placed_rewards
from lightspan.lightning.episode import Episode
from lightspan.lightning.selection import Coverage


def return_of(episode: Episode, coverage: Coverage, bonus: float = 0.0) -> float:
    """The return of a scored rollout.

    Args:
        coverage: says whether rewards on calls are paid for.
        bonus: of AIR, if any.
    """
    placed = placed_rewards(episode, coverage).all() if coverage.step_rewards else []
    return math.fsum([final_reward(episode), *placed, bonus])


def group_rewards(
    episodes: Sequence[Episode],
    coverages: Sequence[Coverage],
    bonuses: Mapping[str, float] | None = None,
) -> dict[str, list[float | None]]:
    """Returns by group, for `needs_resampling`; None for a rollout that statistics leave out.

    Args:
        coverages: one per episode.
        bonuses: of AIR, by attempt (`lightspan.lightning.air.bonuses`).
    """
    bonuses = bonuses or {}
    returns: dict[str, list[float | None]] = defaultdict(list)
    for episode, coverage in zip(episodes, coverages, strict=True):
        scored = episode.scored(coverage.step_rewards)
        counts = episode.finished and not episode.capture_errors and scored
        bonus = bonuses.get(episode.attempt_id, 0.0)
        returns[episode.group_id].append(return_of(episode, coverage, bonus) if counts else None)
    return dict(returns)
