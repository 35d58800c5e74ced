"""Which of several servers a call goes to. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

S = TypeVar("S")

REMEMBERED: Final = 10_000
"""Rollouts, the latest ones."""


class Balance(Generic[S]):
    """The calls of one rollout go to one server, as long as it is there: it has computed the
    beginning of their prompts already. Rollouts go where the fewest calls are, and among those
    where the fewest rollouts went."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, S] = OrderedDict()
        self._sent: dict[S, int] = {}

    def choose(self, rollout: str, loads: Mapping[S, int]) -> S:
        """A server for a call.

        Args:
            rollout: empty if it is of none.
            loads: calls on each server that can be used; at least one.
        """
        home = self._homes.get(rollout)
        if home is None or home not in loads:
            home = min(loads, key=lambda server: (loads[server], self._sent.get(server, 0)))
            self._sent[home] = self._sent.get(home, 0) + 1
        if rollout:
            self._homes[rollout] = home
            self._homes.move_to_end(rollout)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return home
