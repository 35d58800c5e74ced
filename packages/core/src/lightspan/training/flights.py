"""Groups of rollouts that are under way while something else is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from lightspan.errors import ConfigError
from lightspan.schema.checks import check_whole
from lightspan.schema.records import Rollout, RolloutState


class Flights:
    """Which have ended, and in which order. No rollout is known twice."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Rollout]] = {}
        self._open: dict[str, str] = {}
        """Rollout → its group, of those that have not ended."""
        self._left: Counter[str] = Counter()
        """Group → rollouts of it that have not ended."""
        self._states: dict[str, RolloutState] = {}
        self._ended: list[str] = []
        self._news: list[Rollout] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def run_id(self) -> str:
        """Of all of them; there is one."""
        return next(iter(self._groups.values()))[0].run_id

    def rollouts(self, count: int) -> int:
        """How many are in so many groups, the oldest."""
        return sum(map(len, islice(self._groups.values(), count)))

    def left(self, count: int, first: Sequence[str]) -> int:
        """How many rollouts have to end, at least, before so many groups are `ready`."""
        others = sorted(self._left[group] for group in self._groups if group not in first)
        waited = [self._left[group] for group in set(first)]
        return sum(waited) + sum(others[: count - len(waited)])

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """They have begun; each is in a group."""
        for rollout in rollouts:
            assert rollout.group_id is not None
            self._groups.setdefault(rollout.group_id, []).append(rollout)
            self._open[rollout.rollout_id] = rollout.group_id
            self._left[rollout.group_id] += 1

    def see(self, states: Sequence[RolloutState]) -> list[RolloutState]:
        """Those of the states that say that one of ours has ended, which was not known."""
        fresh = [state for state in states if state.rollout.rollout_id in self._open]
        for state in fresh:
            group = self._open.pop(state.rollout.rollout_id)
            self._states[state.rollout.rollout_id] = state
            self._news.append(state.rollout)
            self._left[group] -= 1
            if not self._left[group]:
                self._ended.append(group)
        return fresh

    def news(self) -> list[Rollout]:
        """Those that have ended, taken or not, each once."""
        told, self._news = self._news, []
        return told

    def check(self, count: int, first: Sequence[str]) -> None:
        """Raise `ConfigError` if so many groups cannot be taken, or not those of `first`."""
        check_whole("take: count", count, 0)
        if isinstance(first, str):
            raise ConfigError(f"take(first={first!r}): give a list of ids, such as [{first!r}]")
        if unknown := [group for group in first if group not in self._groups]:
            raise ConfigError(
                f"take(first={unknown}): no such group is in flight; give ids that submit gave, "
                "each once"
            )
        if not len(set(first)) <= count <= len(self._groups):
            raise ConfigError(
                f"take({count}): {len(self._groups)} groups are in flight, and {len(set(first))} "
                "are to be the first: take no more and no fewer"
            )

    def ready(self, count: int, first: Sequence[str]) -> list[str] | None:
        """So many groups that have ended: those of `first`, then the earliest; None as long as
        there are not."""
        before = list(dict.fromkeys(first))
        if any(self._left[group] for group in before):
            return None
        others = [group for group in self._ended if group not in before]
        chosen = [*before, *others[: count - len(before)]]
        return chosen if len(chosen) == count else None

    def pop(self, groups: Sequence[str]) -> list[RolloutState]:
        """Their rollouts, group by group in the order given, each group in the order in which it
        was submitted; from now on they are unknown."""
        states = []
        for group in groups:
            states += [self._states.pop(each.rollout_id) for each in self._groups.pop(group)]
            self._ended.remove(group)
            del self._left[group]
        return states

    def forget(self) -> list[str]:
        """All of it; the rollouts that have not ended."""
        left = list(self._open)
        for known in (self._groups, self._open, self._left, self._states, self._ended, self._news):
            known.clear()
        return left
