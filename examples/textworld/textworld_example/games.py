"""Games that TextWorld generates: find the coin, five rooms in a row.

Each game is one of TextWorld's coin collector: four moves lead to the room of the coin, and the
fifth command takes it. The `.z8` file is compiled by Inform 7, which the wheel of textworld brings,
and played by its Z-machine.

Splits are by route: the four directions of a game decide on its split, so that no route of the test
occurs in training. The seed determines everything.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypedDict

import textworld
from textworld.challenges.tw_coin_collector.coin_collector import KB_PATH, make_game
from textworld.generator import compile_game
from textworld.generator.data import KnowledgeBase

Split: TypeAlias = Literal["train", "dev", "test"]

SPLITS: Final[tuple[Split, ...]] = ("train", "dev", "test")
COUNTS: Final[Mapping[Split, int]] = {"train": 80, "dev": 40, "test": 80}
"""Number of games per split. A game takes a second of CPU time to make: it is compiled twice."""
SHARES: Final[tuple[Split, ...]] = ("dev", "test", "test", "train", "train")
"""Shares of the routes: a fifth for dev, two fifths each for test and train."""
ROOMS: Final = 5
APART: Final = 1_000_000
"""Distance of the seeds of two data sets: the same seed gives the same game."""


class Task(TypedDict):
    """A game as it is stored."""

    id: str
    game: str
    """Path of the `.z8` file, relative to the folder of the data."""
    route: str
    """The directions that lead to the coin, such as `north east east south`."""


def generate(
    data_dir: Path, *, seed: int = 0, counts: Mapping[Split, int] = COUNTS
) -> dict[Split, list[Task]]:
    """Write the games of every split to `data_dir`, and return them as tasks."""
    tasks: dict[Split, list[Task]] = {split: [] for split in counts}
    for number in itertools.count(seed * APART):
        if all(len(tasks[split]) == count for split, count in counts.items()):
            break
        options = _options(number)
        game = make_game("simple", options)
        route = route_of(game)
        split = route_split(route)
        if len(tasks.get(split, ())) >= counts.get(split, 0):
            continue
        task = Task(id=f"{split}-{len(tasks[split]):04d}", game="", route=route)
        options.path = str(data_dir / f"{task['id']}.z8")
        task["game"] = Path(compile_game(game, options)).name
        tasks[split].append(task)
    for split, found in tasks.items():
        lines = "".join(f"{json.dumps(task)}\n" for task in found)
        (data_dir / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return tasks


def load(data_dir: Path, split: Split) -> list[Task]:
    """Read the tasks that `generate` wrote."""
    text = (data_dir / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def make(seed: int, path: Path) -> Path:
    """Compile the game of a seed to a `.z8` file, and return its path."""
    options = _options(seed)
    options.path = str(path)
    return Path(compile_game(make_game("simple", options), options))


def route_of(game: Any) -> str:
    """Return the directions of the shortest way to the coin, with blanks between them."""
    *moves, _ = game.metadata["walkthrough"]  # the last command takes the coin
    return " ".join(move.removeprefix("go ") for move in moves)


def route_split(route: str) -> Split:
    """Return the split of a route, by its hash."""
    return SHARES[hashlib.sha256(route.encode()).digest()[0] % len(SHARES)]


def _options(seed: int) -> textworld.GameOptions:
    options = textworld.GameOptions()
    options.kb = KnowledgeBase.load(KB_PATH)
    options.grammar.allowed_variables_numbering = True
    options.seeds = seed
    options.quest_length = options.nb_rooms = ROOMS
    options.force_recompile = True
    return options
