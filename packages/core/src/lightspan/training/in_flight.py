"""Track groups of rollouts in flight: enqueued in the store, and not trained by a step yet."""

from __future__ import annotations

from collections.abc import Sequence

from lightspan.errors import ConfigError
from lightspan.schema.records import Rollout, RolloutState
from lightspan.schema.validation import check_whole


class InFlight:
    """The groups in flight, and the final states of their rollouts that have ended."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Rollout]] = {}
        self._states: dict[str, RolloutState] = {}
        """Rollout id → state, of rollouts that have ended."""
        self._ended: list[str] = []
        """Groups whose rollouts have all ended, in the order in which they ended."""
        self._news: list[Rollout] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def run_id(self) -> str:
        """Id of the run to which all groups belong; there must be at least one group."""
        return next(iter(self._groups.values()))[0].run_id

    def size(self, count: int, first: Sequence[str]) -> tuple[int, int]:
        """Return how many rollouts `Collector.take` waits for, and how many of them have ended.

        If `first` has fewer than `count` groups, it is not known yet which other groups will be
        taken. The numbers are then estimates: the first is the number of rollouts in the `count`
        oldest groups, and the second is an upper bound.

        Args:
            count: number of groups to take.
            first: ids of groups that must be taken.
        """
        groups = first if len(first) == count else list(self._groups)
        total = sum(len(self._groups[group]) for group in groups[:count])
        ended = sum(r.rollout_id in self._states for group in groups for r in self._groups[group])
        return total, min(total, ended)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add enqueued rollouts, each of which has a group."""
        for rollout in rollouts:
            assert rollout.group_id is not None
            self._groups.setdefault(rollout.group_id, []).append(rollout)

    def update(self, states: Sequence[RolloutState]) -> list[RolloutState]:
        """Record rollouts that have ended.

        Args:
            states: final states of rollouts; states that were recorded before, or belong to no
                group in flight, are ignored.

        Returns:
            The newly recorded states.
        """
        new = []
        for state in states:
            rollout = state.rollout
            group = self._groups.get(rollout.group_id or "")
            if group is None or rollout.rollout_id in self._states:
                continue
            new.append(state)
            self._states[rollout.rollout_id] = state
            self._news.append(rollout)
            if all(member.rollout_id in self._states for member in group):
                self._ended.append(str(rollout.group_id))
        return new

    def news(self) -> list[Rollout]:
        """Return the rollouts that have ended since the previous call of `news`."""
        news, self._news = self._news, []
        return news

    def check(self, count: int, first: Sequence[str]) -> None:
        """Check the arguments of `Collector.take`.

        Raises:
            ConfigError: fewer than `count` groups are in flight, a group of `first` is not in
                flight, or `first` has more than `count` groups.
        """
        check_whole("take: count", count, 0)
        if isinstance(first, str):
            raise ConfigError(f"take(first={first!r}): give a list of ids, such as [{first!r}]")
        if unknown := [group for group in first if group not in self._groups]:
            raise ConfigError(
                f"take(first={unknown}): no such group is in flight; give ids that submit "
                "returned, each once"
            )
        if not len(set(first)) <= count <= len(self._groups):
            raise ConfigError(
                f"take({count}): {len(self._groups)} groups are in flight, and {len(set(first))} "
                "are to be the first: take no more and no fewer"
            )

    def ready(self, count: int, first: Sequence[str]) -> list[str] | None:
        """Return the ids of `count` ended groups, beginning with those of `first`.

        The result is None if fewer than `count` groups have ended, or a group of `first` has not.
        """
        others = [group for group in self._ended if group not in first]
        groups = [*dict.fromkeys(first), *others][:count]
        return groups if len(groups) == count and set(groups) <= set(self._ended) else None

    def pop(self, groups: Sequence[str]) -> list[RolloutState]:
        """Remove ended groups and return the states of their rollouts.

        The order is that of `groups`, and within a group that of submission.
        """
        self._ended = [group for group in self._ended if group not in groups]
        rollouts = [rollout for group in groups for rollout in self._groups.pop(group)]
        return [self._states.pop(rollout.rollout_id) for rollout in rollouts]

    def clear(self) -> list[str]:
        """Remove all groups and return the ids of their rollouts that have not ended."""
        rollouts = [member.rollout_id for group in self._groups.values() for member in group]
        unfinished = [rollout_id for rollout_id in rollouts if rollout_id not in self._states]
        for part in (self._groups, self._states, self._ended, self._news):
            part.clear()
        return unfinished
