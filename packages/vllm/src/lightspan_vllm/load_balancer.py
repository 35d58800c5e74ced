"""Choose the server of a call. A pure data structure, without I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

S = TypeVar("S")

MAX_ROLLOUTS: Final = 10_000
"""Maximum number of rollouts whose server is remembered; the oldest are dropped."""


class LoadBalancer(Generic[S]):
    """Chooses a server for each call; the calls of a rollout go to the same server.

    That server has the common prefix of their prompts in its cache. If it is not available, another
    server is chosen. A new rollout goes to the server with the fewest running calls. If there are
    several, it goes to the one that was chosen for the fewest rollouts.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[str, S] = OrderedDict()
        self._sent: dict[S, int] = {}

    def choose(self, rollout: str, loads: Mapping[S, int]) -> S:
        """Return the server to which a call is sent.

        Args:
            rollout: id of the call's rollout; "" if the call belongs to no rollout.
            loads: available server → number of its running calls; not empty.
        """
        home = self._homes.get(rollout)
        if home is None or home not in loads:
            home = min(loads, key=lambda server: (loads[server], self._sent.get(server, 0)))
            self._sent[home] = self._sent.get(home, 0) + 1
        if rollout:
            self._homes[rollout] = home
            self._homes.move_to_end(rollout)
            if len(self._homes) > MAX_ROLLOUTS:
                self._homes.popitem(last=False)
        return home
