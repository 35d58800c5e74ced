"""The reward: one number at the end of a game; and what players without a model earn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from textworld_example.app import LIMIT, commands, start

Player: TypeAlias = Callable[[list[str], int], str]
"""Function (commands that are offered, number of commands so far) → the next command."""

CHANCE: Final = "any command that is offered"
CHANCES: Final = 16
"""Number of times that chance plays each game."""


def won(now: Any) -> float:
    """Return 1.0 if the game was won, else 0.0. Progress and speed are not rewarded."""
    return 1.0 if now.won else 0.0


def play(env: Any, player: Player, limit: int = LIMIT) -> float:
    """Play a loaded game without a model; return its reward. An impossible command is used up."""
    now = env.reset()
    for count in range(limit):
        offered = commands(now)
        command = player(offered, count)
        if command in offered:
            now = env.step(command)[0]
        if now.won or now.lost:
            break
    return won(now)


def constant_scores(
    games: Sequence[Path], routes: Sequence[str], limit: int = LIMIT
) -> dict[str, float]:
    """Return name of a player that reads nothing → its mean reward.

    The players are chance, the first command that is offered, the last one, and for each route the
    plan that follows it and takes the coin in every game.

    Args:
        routes: directions of a plan, with blanks between them; repeated ones are played once.
    """
    rng = random.Random(0)
    players: dict[str, Player] = {
        CHANCE: lambda offered, count: rng.choice(offered),
        "the first command": lambda offered, count: offered[0],
        "the last command": lambda offered, count: offered[-1],
    }
    players |= {route: _plan(route) for route in dict.fromkeys(routes)}
    sums = dict.fromkeys(players, 0.0)
    for game in games:
        env = start(str(game))
        for name, player in players.items():
            times = CHANCES if name == CHANCE else 1
            sums[name] += sum(play(env, player, limit) for _ in range(times)) / times
    return {name: total / len(games) for name, total in sums.items()}


def _plan(route: str) -> Player:
    plan = [*(f"go {direction}" for direction in route.split()), "take coin"]
    return lambda offered, count: plan[count] if count < len(plan) else "take coin"
