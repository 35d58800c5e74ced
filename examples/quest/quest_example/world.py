"""A text world of rooms, keys and doors: pure Python, no state but what is passed in.

Rooms are a tree. An exit is a passage, a door that is locked with a colour, or a slide, which goes
one way. A key opens one lock of its colour and is then used up; put into another lock it is used up
too, and nothing opens. The world goes on whatever was done: nothing says that it can no longer be
won.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

CROWN: Final = "crown"
"""What the quest is about."""
COLOURS: Final = ("red", "blue", "green", "white", "black", "yellow")
COMPASS: Final = ("north", "east", "south", "west")
OPPOSITE: Final = {"north": "south", "south": "north", "east": "west", "west": "east"}
DOWN: Final = "down"
"""Where a slide goes."""
BEGINNING: Final = "The quest begins."

_CLOSED_DOOR, _SLIDE = 20, 400
"""How far a thing behind it is for the light, in rooms: first what lies about, then what is behind
doors, and what is below a slide last."""


@dataclass(frozen=True)
class Exit:
    """A way out of a room."""

    direction: str
    to: int
    lock: str | None = None
    """The colour of its door; None for a passage or a slide."""

    @property
    def is_slide(self) -> bool:
        return self.direction == DOWN


@dataclass(frozen=True)
class World:
    """What never changes; the quest begins in room 0."""

    rooms: tuple[str, ...]
    """The name of each."""
    exits: tuple[tuple[Exit, ...], ...]
    """Of each room, as they are listed."""
    things: Mapping[int, str]
    """Room → what lies there: a key, by its colour, or the crown."""

    def exit(self, room: int, direction: str) -> Exit | None:
        """The way out in a direction."""
        return next((way for way in self.exits[room] if way.direction == direction), None)

    def to_json(self) -> dict[str, Any]:
        """As a task holds it."""
        return {
            "rooms": list(self.rooms),
            "exits": [[[way.direction, way.to, way.lock] for way in ways] for ways in self.exits],
            "things": {str(room): thing for room, thing in self.things.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> World:
        """What `to_json` gave."""
        return cls(
            rooms=tuple(found["rooms"]),
            exits=tuple(tuple(Exit(*way) for way in ways) for ways in found["exits"]),
            things={int(room): thing for room, thing in found["things"].items()},
        )


class Position(NamedTuple):
    """What changes."""

    room: int = 0
    bag: tuple[str, ...] = ()
    """The colours of the keys, in the order in which they were taken."""
    taken: frozenset[int] = frozenset()
    """The rooms whose thing was taken."""
    opened: frozenset[tuple[int, int]] = frozenset()
    """The doors that are open, each as its two rooms, the lower first."""
    is_won: bool = False
    """Whether the crown was taken."""


class Outcome(NamedTuple):
    """What came of an action."""

    position: Position
    told: str
    is_done: bool
    """Whether anything was done; if not, the position is the one before."""


class Action(NamedTuple):
    """A tool and its arguments."""

    tool: str
    arguments: Mapping[str, str]


def act(world: World, position: Position, action: Action) -> Outcome:
    """Do what an action says."""
    tools: Mapping[str, Callable[..., Outcome]] = {"go": go, "take": take, "unlock": unlock}
    return tools[action.tool](world, position, **action.arguments)


def go(world: World, position: Position, exit: str) -> Outcome:
    """Leave the room."""
    way = world.exit(position.room, exit)
    if way is None:
        return Outcome(position, f"There is no exit {exit}.", False)
    if is_closed(way, position):
        return Outcome(position, f"The {way.lock} door is locked.", False)
    told = "You slide down." if way.is_slide else f"You go {exit}."
    return Outcome(position._replace(room=way.to), told, True)


def take(world: World, position: Position) -> Outcome:
    """Take what lies here."""
    thing = thing_here(world, position)
    if thing is None:
        return Outcome(position, "Nothing lies here.", False)
    taken = position.taken | {position.room}
    if thing == CROWN:
        return Outcome(position._replace(taken=taken, is_won=True), "You take the crown.", True)
    bag = (*position.bag, thing)
    return Outcome(position._replace(taken=taken, bag=bag), f"You take the {thing} key.", True)


def unlock(world: World, position: Position, exit: str, key: str) -> Outcome:
    """Put a key into the lock of a door; it is used up, whether it fits or not.

    Args:
        key: its colour; "red key" is understood too.
    """
    colour = key.removesuffix(" key")
    way = world.exit(position.room, exit)
    if way is None:
        return Outcome(position, f"There is no exit {exit}.", False)
    if not is_closed(way, position):
        return Outcome(position, f"Nothing is locked {exit}.", False)
    if colour not in position.bag:
        return Outcome(position, f"You have no {colour} key.", False)
    at = position.bag.index(colour)
    left = position._replace(bag=position.bag[:at] + position.bag[at + 1 :])
    if colour != way.lock:
        return Outcome(left, f"The {colour} key is used up.", True)
    opened = left._replace(opened=position.opened | {_door(position.room, way.to)})
    return Outcome(opened, f"The {colour} key is used up, the door is open.", True)


def thing_here(world: World, position: Position) -> str | None:
    """What lies in the room."""
    return None if position.room in position.taken else world.things.get(position.room)


def is_closed(way: Exit, position: Position) -> bool:
    """Whether it is a door that is locked still."""
    return way.lock is not None and _door(position.room, way.to) not in position.opened


def actions(world: World, position: Position) -> Iterator[Action]:
    """Every action that does something."""
    if thing_here(world, position) is not None:
        yield Action("take", {})
    for way in world.exits[position.room]:
        if is_closed(way, position):
            for key in dict.fromkeys(position.bag):
                yield Action("unlock", {"exit": way.direction, "key": key})
        else:
            yield Action("go", {"exit": way.direction})


def lit(world: World, position: Position) -> str | None:
    """The direction of the nearest thing that was not taken; None if there is none, or it is here.

    Doors count as far and slides as farther, whichever keys are in the bag: the light stays where
    it is when a key was wasted, and it never tells what is lost.
    """
    if thing_here(world, position) is not None:
        return None
    found = [
        (_distance(world, position, position.room, way), way.direction)
        for way in world.exits[position.room]
    ]
    distance, direction = min(found, key=lambda each: each[0], default=(math.inf, None))
    return direction if distance < math.inf else None


def observation(world: World, position: Position) -> str:
    """What the player sees: the room, its exits, what lies there and what is in the bag.

    It is the state: which actions win from here follows from it, but for what the player has left
    behind. It does not say how often the player has acted.
    """
    light = lit(world, position)
    lines = [f"You are in the {world.rooms[position.room]}."]
    for way in world.exits[position.room]:
        mark = ", lit" if way.direction == light else ""
        lines.append(f"{way.direction}: {_described(way, position)}{mark}")
    thing = thing_here(world, position)
    if thing is not None:
        lines.append(f"Here: {thing if thing == CROWN else f'{thing} key'}")
    keys = [f"{key} key" for key in position.bag]
    # a key to a line: a word at the beginning of one is spelled as it is in a tool's argument
    lines += ["Bag:", *(keys or ["nothing"])]
    return "\n".join(lines)


def _described(way: Exit, position: Position) -> str:
    if way.is_slide:
        return "slide"
    if way.lock is None:
        return "passage"
    return f"{way.lock} door" if is_closed(way, position) else "open door"


def _distance(world: World, position: Position, room: int, way: Exit) -> float:
    """How far the nearest thing behind an exit is."""
    step: float = 1
    if way.is_slide:
        step = _SLIDE
    elif way.lock is not None and _door(room, way.to) not in position.opened:
        step = _CLOSED_DOOR
    if way.to in world.things and way.to not in position.taken:
        return step
    further = (next_ for next_ in world.exits[way.to] if next_.to != room)
    return step + min(
        (_distance(world, position, way.to, next_) for next_ in further), default=math.inf
    )


def _door(one: int, other: int) -> tuple[int, int]:
    return (min(one, other), max(one, other))
