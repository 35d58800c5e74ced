"""Find out by exhaustive search which positions can still be won.

The generator and tests use it; the app and the player do not.
"""

from __future__ import annotations

from collections import deque

from quest_example.world import Action, Position, World, act, actions


class Chart:
    """Every reachable position of a world, with its distance from winning.

    Args:
        start: first position of the quest.
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
        """Number of reachable positions."""
        self._calls = _distances(came)

    def calls_to_win(self, position: Position) -> int | None:
        """Return the fewest calls that win from a reachable position; None if it cannot be won."""
        return self._calls.get(position)

    def fatal(self, position: Position) -> list[Action]:
        """Return the actions after which the quest cannot be won; all actions if it is already
        lost.
        """
        return [
            action
            for action in actions(self._world, position)
            if act(self._world, position, action).position not in self._calls
        ]


def _distances(came: dict[Position, list[Position]]) -> dict[Position, int]:
    """Return position → fewest calls to a won position; positions that cannot be won are left out.

    Args:
        came: position → positions from which one call leads there.
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
