"""What can still be won, by exhaustive search: for generating worlds, and for tests.

The app and the player know none of it.
"""

from __future__ import annotations

from collections import deque

from quest_example.world import Action, Position, World, act, actions


class Chart:
    """Every position of a world that can be reached, and how far it is from winning.

    Args:
        start: where the quest begins.
    """

    def __init__(self, world: World, start: Position = Position()) -> None:  # noqa: B008
        self._world = world
        came: dict[Position, list[Position]] = {start: []}
        waiting = deque([start])
        while waiting:
            here = waiting.popleft()
            if here.is_won:
                continue
            for action in actions(world, here):
                there = act(world, here, action).position
                if there not in came:
                    came[there] = []
                    waiting.append(there)
                came[there].append(here)
        self.reachable = len(came)
        """Positions."""
        self._calls = _distances(came)

    def calls_to_win(self, position: Position) -> int | None:
        """The fewest calls that win from a position that can be reached; None if none do."""
        return self._calls.get(position)

    def fatal(self, position: Position) -> list[Action]:
        """What can be done here after which the quest cannot be won; all of it, if it is lost."""
        return [
            action
            for action in actions(self._world, position)
            if act(self._world, position, action).position not in self._calls
        ]


def _distances(came: dict[Position, list[Position]]) -> dict[Position, int]:
    """How many steps back from a position that is won, for each that has a way there.

    Args:
        came: position → those from which one call leads to it.
    """
    found = {position: 0 for position in came if position.is_won}
    waiting = deque(found)
    while waiting:
        there = waiting.popleft()
        for here in came[there]:
            if here not in found:
                found[here] = found[there] + 1
                waiting.append(here)
    return found
