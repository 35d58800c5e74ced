"""What a careful player does: it knows no more than the observation tells."""

from __future__ import annotations

from quest_example.world import (
    Action,
    Position,
    World,
    act,
    is_closed,
    lit,
    thing_here,
)


def careful(world: World, position: Position) -> Action | None:
    """Take what lies here, else follow the light, with the key of a door's colour.

    None where the light leads to a door whose key is not in the bag: the quest is lost.
    """
    if thing_here(world, position) is not None:
        return Action("take", {})
    direction = lit(world, position)
    way = None if direction is None else world.exit(position.room, direction)
    if way is None:
        return None
    if not is_closed(way, position):
        return Action("go", {"exit": way.direction})
    if way.lock not in position.bag:
        return None
    return Action("unlock", {"exit": way.direction, "key": str(way.lock)})


def careful_path(world: World, limit: int) -> list[tuple[Position, Action]] | None:
    """Where a careful player is, and what it does there; None if that does not win."""
    path: list[tuple[Position, Action]] = []
    position = Position()
    while not position.is_won:
        action = careful(world, position)
        if action is None or len(path) == limit:
            return None
        path.append((position, action))
        position = act(world, position, action).position
    return path
