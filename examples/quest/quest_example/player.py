"""A careful player, which uses only what the observation shows."""

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
    """Return the next action: take what lies here, else follow the light and unlock its door.

    None if the light leads to a door whose key is not in the bag, so that the quest is lost.
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
    """Return the positions and actions of a careful player; None without a win in `limit` calls."""
    path: list[tuple[Position, Action]] = []
    position = Position()
    while not position.is_won:
        action = careful(world, position)
        if action is None or len(path) == limit:
            return None
        path.append((position, action))
        position = act(world, position, action).position
    return path
