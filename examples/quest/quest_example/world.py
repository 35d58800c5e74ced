"""A text world of rooms, keys and doors, as pure functions of a world and a position.

Rooms form a tree. An exit is a passage, a locked door with a colour, or a slide, which goes one
way. A key opens one lock of its colour and is then used up; in another lock it is used up too, and
nothing opens. The game never says that it can no longer be won.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

CROWN: Final = "crown"
"""The thing that wins the quest."""
COLOURS: Final = ("red", "blue", "green", "white", "black", "yellow")
COMPASS: Final = ("north", "east", "south", "west")
OPPOSITE: Final = {"north": "south", "south": "north", "east": "west", "west": "east"}
DOWN: Final = "down"
"""Direction of a slide."""
BEGINNING: Final = "The quest begins."

_CLOSED_DOOR, _SLIDE = 20, 400
"""Distances in rooms that the light counts for a closed door and for a slide.

So the light leads first to things that lie in reach, then to things behind doors, and last to
things below a slide.
"""


@dataclass(frozen=True)
class Exit:
    """An exit of a room."""

    direction: str
    to: int
    lock: str | None = None
    """Colour of the door; None for a passage or a slide."""

    @property
    def is_slide(self) -> bool:
        return self.direction == DOWN


@dataclass(frozen=True)
class World:
    """The part of a quest that never changes; the quest begins in room 0."""

    rooms: tuple[str, ...]
    """Name of each room."""
    exits: tuple[tuple[Exit, ...], ...]
    """Exits of each room, in the order of the observation."""
    things: Mapping[int, str]
    """Room → thing there: the colour of a key, or the crown."""

    def exit(self, room: int, direction: str) -> Exit | None:
        """Return the exit of a room in a direction; None if there is none."""
        return next((way for way in self.exits[room] if way.direction == direction), None)

    def to_json(self) -> dict[str, Any]:
        """Return the world as JSON values, for a task."""
        return {
            "rooms": list(self.rooms),
            "exits": [[[way.direction, way.to, way.lock] for way in ways] for ways in self.exits],
            "things": {str(room): thing for room, thing in self.things.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> World:
        """Return the world from the JSON values of `to_json`."""
        return cls(
            rooms=tuple(found["rooms"]),
            exits=tuple(tuple(Exit(*way) for way in ways) for ways in found["exits"]),
            things={int(room): thing for room, thing in found["things"].items()},
        )


class Position(NamedTuple):
    """The part of a quest that changes."""

    room: int = 0
    bag: tuple[str, ...] = ()
    """Colours of the keys in the bag, in the order in which they were taken."""
    taken: frozenset[int] = frozenset()
    """Rooms whose thing was taken."""
    opened: frozenset[tuple[int, int]] = frozenset()
    """Open doors, each as its two rooms in ascending order."""
    is_won: bool = False
    """Whether the crown was taken."""


class Outcome(NamedTuple):
    """Result of an action: the new position, and the text for the player."""

    position: Position
    told: str
    is_done: bool
    """Whether the action was possible; if not, `position` is unchanged."""


class Action(NamedTuple):
    """A tool and its arguments."""

    tool: str
    arguments: Mapping[str, str]


def act(world: World, position: Position, action: Action) -> Outcome:
    """Carry out an action."""
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
    """Take the thing in this room."""
    thing = thing_here(world, position)
    if thing is None:
        return Outcome(position, "Nothing lies here.", False)
    taken = position.taken | {position.room}
    if thing == CROWN:
        return Outcome(position._replace(taken=taken, is_won=True), "You take the crown.", True)
    bag = (*position.bag, thing)
    return Outcome(position._replace(taken=taken, bag=bag), f"You take the {thing} key.", True)


def unlock(world: World, position: Position, exit: str, key: str) -> Outcome:
    """Use a key on a door; the key is used up, whether it fits or not.

    Args:
        exit: direction of the door.
        key: colour of the key, such as `red`; `red key` is accepted too.
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
    """Return the thing in this room; None if there is none or it was taken."""
    return None if position.room in position.taken else world.things.get(position.room)


def is_closed(way: Exit, position: Position) -> bool:
    """Return whether an exit of this room is a door that is still locked."""
    return way.lock is not None and _door(position.room, way.to) not in position.opened


def actions(world: World, position: Position) -> Iterator[Action]:
    """Yield every action that has an effect."""
    if thing_here(world, position) is not None:
        yield Action("take", {})
    for way in world.exits[position.room]:
        if is_closed(way, position):
            for key in dict.fromkeys(position.bag):
                yield Action("unlock", {"exit": way.direction, "key": key})
        else:
            yield Action("go", {"exit": way.direction})


def lit(world: World, position: Position) -> str | None:
    """Return the direction of the nearest thing that was not taken; None if nothing is left or the
    thing is in this room.

    The keys in the bag do not matter, so the light stays where it is after a key was wasted, and
    never shows that the quest is lost.
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
    """Return the text that the player sees: the room, its exits, the thing there, and the bag.

    It determines which actions still win, except for what the player left behind. It does not
    contain the number of past actions.
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
    """Return the distance of the nearest thing behind an exit; infinity if there is none."""
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
