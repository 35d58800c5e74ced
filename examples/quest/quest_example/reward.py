"""The reward: one number at the end of a quest."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from quest_example.world import Action, Position, World, act, actions


def solved(position: Position) -> float:
    """Return 1.0 if the crown was taken, else 0.0. Progress and speed are not rewarded."""
    return 1.0 if position.is_won else 0.0


def plan_scores(
    plans: Mapping[str, Sequence[Action]], worlds: Sequence[World], max_calls: int
) -> dict[str, float]:
    """Return name of a plan → share of the worlds that it solves.

    A plan is a fixed list of actions, carried out whatever is observed. An impossible action counts
    as a call; actions after the first `max_calls` are dropped.
    """
    return {
        name: sum(map(solved, (_follow(world, plan[:max_calls]) for world in worlds))) / len(worlds)
        for name, plan in plans.items()
    }


def random_score(worlds: Sequence[World], max_calls: int, *, seed: int = 0) -> float:
    """Return the share of worlds solved by random choices among the actions that have an effect."""
    rng = random.Random(seed)
    return sum(solved(_wander(world, max_calls, rng)) for world in worlds) / len(worlds)


def _follow(world: World, plan: Sequence[Action]) -> Position:
    position = Position()
    for action in plan:
        if not position.is_won:
            position = act(world, position, action).position
    return position


def _wander(world: World, max_calls: int, rng: random.Random) -> Position:
    position = Position()
    for _ in range(max_calls):
        choices = [] if position.is_won else list(actions(world, position))
        if not choices:  # won, or below a slide before a door without a key
            break
        position = act(world, position, rng.choice(choices)).position
    return position
