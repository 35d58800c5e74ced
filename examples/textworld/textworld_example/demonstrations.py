"""Imperfect demonstrations of the player, for the warm start before reinforcement learning.

They follow the winning plan that TextWorld knows from every state of a game
(`policy_commands`). At some states another command is played in its place, mostly the way back. A
mistake costs two commands, so two of them lose the game. Reinforcement learns to leave them out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import textworld

from textworld_example.app import INFOS, LIMIT, RULES, commands, describe, start

Chat: TypeAlias = dict[str, Any]

COUNT: Final = 6_400
"""Number of demonstrated commands of a warm start."""
MISTAKE_RATE: Final = 0.35
"""Probability of another command, where more than one is offered."""
WITH_PLAN: Final = textworld.EnvInfos(**dict.fromkeys(INFOS.basics, True), policy_commands=True)


def demonstrate(games: Sequence[Path], count: int = COUNT, seed: int = 0) -> list[Chat]:
    """Return demonstrated commands in random order, from the games in turn.

    Equal arguments give equal lists.
    """
    rng = random.Random(f"demonstrations {seed}")
    envs = [start(str(game), WITH_PLAN) for game in games]
    found: list[Chat] = []
    while len(found) < count:
        for env in envs:
            found += play(env, rng)
    rng.shuffle(found)
    return found[:count]


def play(env: Any, rng: random.Random) -> list[Chat]:
    """Return the commands of an imperfect game as chats."""
    chats: list[Chat] = []
    now = env.reset()
    done: list[str] = []
    while not now.won and len(done) < LIMIT:
        command = now.policy_commands[0]
        others = [each for each in commands(now) if each != command]
        if others and rng.random() < MISTAKE_RATE:
            command = rng.choice(others)
        chats.append(_chat(describe(now, done), command))
        now = env.step(command)[0]
        done.append(command)
    return chats


def _chat(prompt: str, command: str) -> Chat:
    return {
        "messages": [
            {"role": "system", "content": RULES},
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": command},
        ]
    }
