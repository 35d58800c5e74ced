"""Returns: the total reward of a rollout, from which statistics are computed.

A return is the sum of the final reward, the rewards on calls if the credit rule uses them (each
once and undiscounted), and the bonuses of AIR. Unplaced rewards (`PlacedRewards`) are left out,
because no call is credited with them, so that nothing can be learned from their differences.
Potentials and length penalties are not rewards and are left out too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from lightspan.lightning.credit import final_reward, placed_rewards
from lightspan.lightning.episode import CallKey, Episode
from lightspan.lightning.selection import Coverage


def return_of(episode: Episode, coverage: Coverage, bonus: float = 0.0) -> float:
    """Return the return (total reward) of a scored rollout.

    Args:
        episode: a scored episode.
        coverage: status of the episode's calls. Its `step_rewards` says whether rewards on calls
            count.
        bonus: sum of the bonuses of Automatic Intermediate Rewarding (AIR); 0 without AIR.
    """
    rewards = [final_reward(episode), bonus]
    if coverage.step_rewards:
        placed = placed_rewards(episode, coverage.turns)
        rewards += chain.from_iterable([*placed.own, *placed.shared])
    return math.fsum(rewards)


def failed_tries(episode: Episode, coverage: Coverage, value: float) -> dict[CallKey, float]:
    """Return call in a failed try (`Episode.retried`) → number that stands for the return.

    Only calls of agents to train are included. Empty without a failure reward.

    Args:
        episode: a scored episode.
        coverage: status of the episode's calls.
        value: return (total reward) of the rollout.
    """
    limit, calls = episode.failure_reward, coverage.turns.calls
    keys = () if limit is None else [call.key for call in calls if call.key in episode.retried]
    return dict.fromkeys(keys, min(value, limit or 0.0))


def group_rewards(
    episodes: Sequence[Episode], coverages: Sequence[Coverage], bonuses: Mapping[str, float] = {}
) -> tuple[dict[str, list[float | None]], dict[str, list[float]]]:
    """Return group id → return (total reward) of each rollout, and → credits of failed tries.

    None stands for a rollout that the statistics leave out: unfinished, damaged or unscored. Forks
    are left out, because a group has one return of each family.

    Args:
        episodes: episodes of whole groups.
        coverages: status of the calls of each episode, in the order of `episodes`.
        bonuses: attempt id → sum of AIR's bonuses (`lightspan.lightning.air.bonuses`); empty if
            there are none.
    """
    returns: dict[str, list[float | None]] = defaultdict(list)
    failed: dict[str, list[float]] = defaultdict(list)
    for episode, coverage in zip(episodes, coverages, strict=True):
        if episode.fork is not None:
            continue
        scored, group = episode.scored(coverage.step_rewards), episode.group_id
        value = None
        if episode.finished and not episode.capture_errors and scored:
            value = return_of(episode, coverage, bonuses.get(episode.attempt_id, 0.0))
            failed[group] += failed_tries(episode, coverage, value).values()
        returns[group].append(value)
    return dict(returns), dict(failed)
