"""Put the rollouts of one task together, as they are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from lightspan_ui import views
from lightspan_ui.entries import Entry
from lightspan_ui.facts import beginning

MAX_MEMBERS: Final = 200
"""Maximum members of a group in an answer; the best ones. `GroupRow.size` counts all."""


class Group(NamedTuple):
    """The rollouts of a group that pass the filters."""

    group: str
    mode: str
    step: int
    entries: list[Entry]
    """Best first, unscored ones last."""
    mean: float | None
    spread: float | None
    newest: int
    """Position of the newest rollout."""

    @property
    def name(self) -> str:
        """Name of the group that no other group of the store has."""
        return f"{self.group}/{self.mode}/{self.step}"

    def view(self, task: str) -> views.GroupRow:
        """Return the group as a row of a table.

        Args:
            task: the task as text.
        """
        return views.GroupRow(
            group=self.group,
            task=beginning(task),
            task_id=self.entries[0].summary.task_id,
            mode=self.mode,
            step=self.step,
            size=len(self.entries),
            mean=self.mean,
            spread=self.spread,
            members=[
                views.Member(
                    rollout_id=entry.summary.rollout_id,
                    reward=entry.reward,
                    status=str(entry.summary.status),
                )
                for entry in self.entries[:MAX_MEMBERS]
            ],
        )


def group_rows(entries: Sequence[Entry], sort: str) -> list[Group]:
    """Return the groups of rollouts, sorted.

    Evaluations have no groups: there the rollouts of a task in one step are a group.
    """
    members: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in entries:
        key = entry.group, str(entry.summary.mode), entry.step
        members.setdefault(key, []).append(entry)
    groups = [group_of(*key, group) for key, group in members.items()]
    return sorted(groups, key=_SORTS[sort])


def group_of(group: str, mode: str, step: int, entries: Sequence[Entry]) -> Group:
    """Return a group of rollouts with the mean and the spread of its rewards."""
    rewards = [entry.reward for entry in entries if entry.reward is not None]
    return Group(
        group=group,
        mode=mode,
        step=step,
        entries=sorted(entries, key=best_first),
        mean=math.fsum(rewards) / len(rewards) if rewards else None,
        spread=max(rewards) - min(rewards) if len(rewards) > 1 else None,
        newest=max(entry.summary.position for entry in entries),
    )


def best_first(entry: Entry) -> tuple[float, int]:
    """Return a key that sorts by reward, the highest first; unscored ones are last."""
    reward = math.inf if entry.reward is None else -entry.reward
    return reward, entry.summary.position


def _last(value: float | None, sign: int) -> float:
    return math.inf if value is None else sign * value


_SORTS: Final[Mapping[str, Callable[[Group], Any]]] = {
    "newest": lambda group: -group.newest,
    "spread": lambda group: (_last(group.spread, -1), -group.newest),
    "flat": lambda group: (_last(group.spread, 1), -group.newest),
    "worst": lambda group: (_last(group.mean, 1), -group.newest),
    "best": lambda group: (_last(group.mean, -1), -group.newest),
}
