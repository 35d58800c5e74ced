"""TextWorld's coin_collector as a task: games, demonstrations, and an app that plays them.

The app is plain Python without a client of an SDK. Each prompt is the state of the game, so that
prompts stay short. A game is the file that TextWorld 1.7 compiles from a seed; splits differ by
seed, because the same seed gives the same rooms and things.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

from _reasoning_tasks import ask

from lightspan import LLM, rollout

ROOMS: Final = 3
QUEST_LENGTH: Final = 3
"""Commands of the shortest way to win: two to walk and one to take the coin."""
LIMIT: Final = 6
"""Commands after which a game ends."""
MAX_TOKENS: Final = 16
RULES: Final = "You play a text game. Reply with one of the commands and nothing else."
IDLE: Final = ("examine ", "inventory", "look")
"""Beginnings of commands that are always offered and change nothing."""
FIRST_SEED: Final = {"train": 0, "dev": 1_000_000, "test": 2_000_000}
PLAYS: Final = 5
"""Plays of each game by random commands, for the score of chance."""
_LOADING = threading.Lock()
"""All threads share the parser with which TextWorld loads a game."""


class Task(TypedDict):
    """One game."""

    id: str
    game: str
    """Path of the `.z8` file."""


@rollout
def play(task: Task, llm: LLM) -> float:
    """Play a game; return 1 if it was won within `LIMIT` commands, else 0."""
    env, state = start(task["game"])
    done: list[str] = []
    while len(done) < LIMIT and not (state.won or state.lost):
        rules = {"role": "system", "content": RULES}
        command = ask(llm, [rules, {"role": "user", "content": prompt(state, done)}], MAX_TOKENS)
        if command in offered(state):
            state = env.step(command)[0]
            done.append(command)
        else:
            done.append("nothing")
    return float(state.won)


def start(game: str, **infos: bool) -> tuple[Any, Any]:
    """Return a game that has begun, and its first state."""
    import textworld

    fields = ("description", "inventory", "admissible_commands", "objective", "won", "lost")
    wanted = textworld.EnvInfos(**dict.fromkeys(fields, True), **infos)
    with _LOADING:
        env = textworld.start(game, wanted)
    return env, env.reset()


def offered(state: Any) -> list[str]:
    """Return the commands that change something, in the order of TextWorld."""
    return [text for text in state.admissible_commands if not text.startswith(IDLE)]


def prompt(state: Any, done: Sequence[str]) -> str:
    """Return the state as text; what all prompts of a game share comes first."""
    room = " ".join(state.description.split())
    return (
        f"{state.objective}\nDone: {', '.join(done) or 'nothing'}\n{room} {state.inventory}\n"
        f"Commands: {', '.join(offered(state))}"
    )


def make_tasks(folder: Path, split: str, count: int) -> list[Task]:
    """Return `count` games of a split; those that `folder` lacks are compiled first."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        Task(id=f"{split}-{number}", game=str(make_game(folder, FIRST_SEED[split] + number)))
        for number in range(count)
    ]


def make_game(folder: Path, seed: int) -> Path:
    """Return the file of the game of a seed, compiled unless it is there."""
    path = folder / f"coin-{ROOMS}-{QUEST_LENGTH}-{seed}.z8"
    if path.exists():
        return path
    import textworld
    from textworld.challenges.tw_coin_collector import coin_collector
    from textworld.generator.data import KnowledgeBase

    options = textworld.GameOptions()
    options.kb = KnowledgeBase.load(coin_collector.KB_PATH)
    options.grammar.allowed_variables_numbering = True
    options.seeds = seed
    options.nb_rooms, options.quest_length = ROOMS, QUEST_LENGTH
    options.path = str(path)
    textworld.generator.compile_game(coin_collector.make_game("simple", options), options)
    return path


def demonstrations(tasks: Sequence[Task], count: int, seed: int, wrong: float) -> list[Any]:
    """Return `count` chats of a state and a command, a share `wrong` of which is a random command.

    The random commands are played too, so that the chats contain states off the shortest way.
    """
    rng = random.Random(seed)
    chats: list[Any] = []
    while len(chats) < count:
        env, state = start(rng.choice(tasks)["game"], policy_commands=True)
        done: list[str] = []
        while len(done) < LIMIT and not (state.won or state.lost):
            best = (state.policy_commands or offered(state))[0]
            command = rng.choice(offered(state)) if rng.random() < wrong else best
            rules = {"role": "system", "content": RULES}
            asked = {"role": "user", "content": prompt(state, done)}
            said = {"role": "assistant", "content": command}
            chats.append({"messages": [rules, asked, said]})
            state = env.step(command)[0]
            done.append(command)
    return chats[:count]


def chance(tasks: Sequence[Task]) -> float:
    """Return the share of games that random offered commands win, `PLAYS` plays each."""
    rng = random.Random(0)
    won = 0
    for task in tasks:
        for _ in range(PLAYS):
            env, state = start(task["game"])
            for _ in range(LIMIT):
                if state.won or state.lost:
                    break
                state = env.step(rng.choice(offered(state)))[0]
            won += state.won
    return won / (PLAYS * len(tasks))
