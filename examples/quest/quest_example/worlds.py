"""Generated worlds of rooms, keys and doors.

A world has four zones in a row, joined by two locked doors and by one slide. The keys lie in zones
before their doors, the crown lies in the last zone; further rooms and doors lead nowhere. A world
is kept only if a careful player wins it with MIN_CALLS to MAX_CALLS calls, and no shorter way
exists. On this way each of the three fatal mistakes must be possible: the wrong key in a lock, a
key for a door that leads nowhere, the slide before all keys are taken.

Splits are by structure: worlds that differ only in the names of rooms, colours and directions have
one structure (`structure`), and each structure belongs to one split (`structure_split`).

The seed determines everything.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypedDict

from quest_example.chart import Chart
from quest_example.player import careful_path
from quest_example.world import (
    COLOURS,
    COMPASS,
    CROWN,
    DOWN,
    OPPOSITE,
    Exit,
    Position,
    World,
    lit,
)

Split: TypeAlias = Literal["train", "dev", "test"]
Ruin: TypeAlias = Literal["wrong key", "dark door", "early slide"]
"""Actions that lose a quest for good."""

SPLITS: Final[tuple[Split, ...]] = ("train", "dev", "test")
COUNTS: Final[Mapping[Split, int]] = {"train": 400, "dev": 150, "test": 250}
"""Number of worlds per split, all of different structures."""
RUINS: Final[tuple[Ruin, ...]] = ("wrong key", "dark door", "early slide")
MIN_CALLS, MAX_CALLS = 12, 14
"""Fewest and most calls that a careful player may need."""
ROOMS: Final = (
    *("attic", "barn", "cave", "cellar", "chapel", "cloister", "court", "crypt", "den"),
    *("forge", "gallery", "garden", "hall", "hut", "kitchen", "library", "loft", "mill"),
    *("pantry", "parlour", "stable", "study", "tower", "vault"),
)


class Task(TypedDict):
    """A quest as it is stored."""

    id: str
    world: dict[str, Any]
    """The world in the form of `World.to_json`."""


# --- generating -----------------------------------------------------------------------------
def generate(
    data_dir: Path, *, seed: int = 0, counts: Mapping[Split, int] = COUNTS
) -> dict[Split, list[Task]]:
    """Write the quests of every split to `data_dir`, and return them."""
    tasks: dict[Split, list[Task]] = {}
    for split, count in counts.items():
        found = itertools.islice(different_worlds(split, f"{seed} {split}"), count)
        tasks[split] = [
            Task(id=f"{split}-{number:04d}", world=world.to_json())
            for number, world in enumerate(found)
        ]
        lines = "".join(f"{json.dumps(task)}\n" for task in tasks[split])
        (data_dir / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return tasks


def load(data_dir: Path, split: Split) -> list[Task]:
    """Read the tasks that `generate` wrote."""
    text = (data_dir / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def different_worlds(split: Split, seed: str) -> Iterator[World]:
    """Yield worlds of a split without end, all of different structures."""
    seen: set[str] = set()
    for world in worlds(split, seed):
        name = structure(world)
        if name not in seen:
            seen.add(name)
            yield world


def worlds(split: Split, seed: str) -> Iterator[World]:
    """Yield worlds of a split without end."""
    rng = random.Random(f"worlds {seed}")
    while True:
        world = _sketch(rng)
        if _is_long(world) and structure_split(structure(world)) == split and is_good(world):
            yield world


def is_good(world: World) -> bool:
    """Return whether a careful player wins by a shortest way on which each fatal mistake is
    possible.
    """
    path = careful_path(world, MAX_CALLS)
    if path is None or len(path) < MIN_CALLS:
        return False
    chart = Chart(world)
    met = {ruin for position, _ in path for ruin in ruins(world, chart, position)}
    return met == set(RUINS) and chart.calls_to_win(Position()) == len(path)


def _is_long(world: World) -> bool:
    """Return whether a careful player wins with MIN_CALLS to MAX_CALLS calls."""
    path = careful_path(world, MAX_CALLS)
    return path is not None and len(path) >= MIN_CALLS


def ruins(world: World, chart: Chart, position: Position) -> set[Ruin]:
    """Return the kinds of actions that lose the quest from a position that can be won."""
    kinds: set[Ruin] = set()
    light = lit(world, position)
    for action in chart.fatal(position):
        way = world.exit(position.room, action.arguments["exit"])
        assert way is not None
        if action.tool == "go":
            kinds.add("early slide")
        elif action.arguments["key"] == way.lock:
            kinds.add("dark door")
        elif way.direction == light:
            kinds.add("wrong key")
    return kinds


# --- a world from chance --------------------------------------------------------------------
@dataclass
class _Room:
    zone: int
    exits: list[Exit]
    thing: str | None = None


class _Sketch:
    """A world under construction."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rooms = [_Room(0, [])]

    def zone(self, zone: int) -> list[int]:
        """Return the rooms of a zone that have no thing yet."""
        return [
            number
            for number, room in enumerate(self.rooms)
            if room.zone == zone and room.thing is None
        ]

    def add(self, zone: int, beside: int, kind: str) -> int | None:
        """Add a room behind a new exit of the room `beside`, and return its number.

        None if the room `beside` has no free direction.

        Args:
            zone: zone of the new room.
            kind: kind of the exit: `"passage"`, `"slide"` or the colour of a door.
        """
        there, here = len(self.rooms), self.rooms[beside]
        if kind == "slide":
            here.exits.append(Exit(DOWN, there))
            self.rooms.append(_Room(zone, []))
            return there
        used = {way.direction for way in here.exits}
        free = [direction for direction in COMPASS if direction not in used]
        if not free:
            return None
        direction = self.rng.choice(free)
        lock = None if kind == "passage" else kind
        here.exits.append(Exit(direction, there, lock))
        self.rooms.append(_Room(zone, [Exit(OPPOSITE[direction], beside, lock)]))
        return there

    def world(self) -> World:
        """Return the sketch as a world, with random names for its rooms."""
        order = [*COMPASS, DOWN]
        return World(
            rooms=tuple(self.rng.sample(ROOMS, len(self.rooms))),
            exits=tuple(
                tuple(sorted(room.exits, key=lambda way: order.index(way.direction)))
                for room in self.rooms
            ),
            things={n: room.thing for n, room in enumerate(self.rooms) if room.thing is not None},
        )


def _sketch(rng: random.Random) -> World:
    """Return a random world; most are not good (`is_good`)."""
    while True:
        sketch = _Sketch(rng)
        if _build(sketch, rng):
            return sketch.world()


def _build(sketch: _Sketch, rng: random.Random) -> bool:
    """Add zones, things and dead ends; return False if there was no room for one of them."""
    colours = rng.sample(COLOURS, 2)
    gates = rng.choice([["slide", *colours], [colours[0], "slide", colours[1]]])
    for zone in range(4):
        if zone and sketch.add(zone, rng.choice(sketch.zone(zone - 1)), gates[zone - 1]) is None:
            return False
        for _ in range(rng.choice((1, 1, 2)) if zone == 0 else rng.choice((0, 1, 1))):
            if sketch.add(zone, rng.choice(sketch.zone(zone)), "passage") is None:
                return False
    real = len(sketch.rooms)
    for colour in colours:
        free = [n for zone in range(gates.index(colour) + 1) for n in sketch.zone(zone) if n]
        if not free:
            return False
        sketch.rooms[rng.choice(free)].thing = colour
    free = sketch.zone(3)
    if not free:
        return False
    sketch.rooms[rng.choice(free)].thing = CROWN
    dark = [*(["passage"] * rng.randint(1, 2)), *rng.choices(colours, k=rng.randint(1, 2))]
    return all(sketch.add(-1, rng.randrange(real), kind) is not None for kind in dark)


# --- structures and splits ------------------------------------------------------------------
def structure(world: World) -> str:
    """Return a text that is equal for two worlds if they differ only in names.

    Names are those of rooms, colours and directions. The text is the canonical form of a tree (Aho,
    Hopcroft and Ullman), the smallest over all renamings of colours.
    """
    colours = sorted({way.lock for ways in world.exits for way in ways if way.lock is not None})
    letters = "abcdef"[: len(colours)]
    forms = (
        _form(world, 0, None, dict(zip(colours, order, strict=True)))
        for order in itertools.permutations(letters)
    )
    return min(forms)


def _form(world: World, room: int, back: int | None, names: Mapping[str, str]) -> str:
    thing = world.things.get(room, "")
    below = sorted(
        f"{_kind(way, names)}{_form(world, way.to, room, names)}"
        for way in world.exits[room]
        if way.to != back
    )
    return f"({names.get(thing, thing)}{''.join(below)})"


def _kind(way: Exit, names: Mapping[str, str]) -> str:
    return ">" if way.is_slide else f"[{names[way.lock]}]" if way.lock is not None else "-"


def structure_split(name: str) -> Split:
    """Return the split of a structure: a quarter of all for dev, a quarter for test."""
    digest = hashlib.sha256(name.encode()).digest()[0]
    shares: dict[int, Split] = {0: "dev", 1: "test"}
    return shares.get(digest % 4, "train")
