"""Whole replays: repeat attempts with the recorded answers, and report what differs.

The app and its tools run again; no model is asked. An app whose attempts replay to the byte can be
forked at any call (`lightspan.lightning.forks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

import msgspec

from lightspan.lightning.episode import Episode
from lightspan.lightning.forks import ForkPoint, fork_points
from lightspan.progress import plural
from lightspan.training.session import Session

MAX_REPLAYS: Final = 12
"""Maximum number of attempts that a dry run repeats."""
MAX_DEPARTURES: Final = 3
"""Maximum number of departures, each of another task, that the text shows."""
_GIVEN: Final = ("returned", "emitted")
"""Sources of rewards that the app gave itself."""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts that a dry run repeated with their recorded answers."""

    repeated: int
    """Number of attempts that were repeated."""
    exact: int
    """Number of them in which every request equalled the recorded one."""
    calls: int
    """Number of recorded calls of the repeated attempts."""
    replayed: int
    """Number of these calls that were answered again as recorded."""
    departures: list[str] = []
    """For each other attempt, its task and the first difference."""
    rewards: list[str] = []
    """For each exact attempt that got another reward, its task and both rewards."""
    refusals: dict[str, int] = {}
    """Reason → number of attempts that cannot be repeated for this reason."""

    def text(self) -> list[str]:
        """Return the report as lines of text; empty if there were no attempts."""
        lines = []
        if self.repeated and self.exact == self.repeated:
            lines.append(
                f"your app replays to the byte: {self.exact} of {self.repeated} rollouts, "
                f"{plural(self.calls, 'call')}; no model was asked"
            )
        elif self.repeated:
            lines.append(
                f"{self.exact} of {plural(self.repeated, 'rollout')} replay to the byte, "
                f"{self.replayed} of {plural(self.calls, 'call')}; no model was asked"
            )
        first = {text.partition(": ")[0]: text for text in reversed(self.departures)}  # of a task
        shown = [*first.values()][::-1][:MAX_DEPARTURES]
        lines += [f"departed: {text}" for text in shown]
        if len(self.departures) > len(shown):
            lines.append(f"and {len(self.departures) - len(shown)} more")
        if self.rewards:
            lines.append(
                f"{plural(len(self.rewards), 'rollout')} got another reward for the same answers: "
                f"{self.rewards[0]}"
            )
        lines += [
            f"{plural(count, 'rollout')} cannot be repeated: {why}"
            for why, count in self.refusals.items()
        ]
        return lines


async def repeat_attempts(session: Session, episodes: Sequence[Episode]) -> ReplayReport:
    """Repeat attempts of a dry run, and return what happened.

    Args:
        session: the session that ran the attempts.
        episodes: the attempts; a part of each task's is repeated.
    """
    ends = [fork_points(episode)[-1] for episode in _of_every_task(episodes) if episode.calls]
    points = [point for point in ends if not point.refusal][:MAX_REPLAYS]
    refusals = dict(Counter(point.refusal for point in ends if point.refusal).most_common())
    if points:
        session.reporter.line(
            f"dry run: repeating {plural(len(points), 'rollout')} with the recorded answers"
        )
    repeated = await session.run_forks(points, 1) if points else []
    session.reporter.finish()
    recorded = {episode.attempt_id: episode for episode in episodes}
    pairs = [
        (recorded[point.attempt_id], point, episode)
        for point, (_, episode) in zip(points, repeated, strict=True)
    ]
    departures = [
        f"task {before.task_id}: {why}"
        for before, point, after in pairs
        if (why := _why(point, after))
    ]
    rewards = [
        f"task {before.task_id}: {before.reward} and {after.reward}"
        for before, point, after in pairs
        if not _why(point, after)
        and (before.reward_source in _GIVEN and after.reward_source in _GIVEN)
        and before.reward != after.reward
    ]
    return ReplayReport(
        repeated=len(points),
        exact=len(points) - len(departures),
        calls=sum(len(point.prefix) for point in points),
        replayed=sum(map(_replayed, (after for _, _, after in pairs))),
        departures=departures,
        rewards=rewards,
        refusals=refusals,
    )


def _of_every_task(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes in an order in which the first of each task come first."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    rounds = zip_longest(*groups.values())
    return [episode for each in rounds for episode in each if episode is not None]


def _replayed(episode: Episode) -> int:
    return len({call.call_id for call in episode.calls if call.outcome == "replayed"})


def _why(point: ForkPoint, episode: Episode) -> str:
    """Return why a repeated attempt does not equal the recorded one; empty if it does."""
    if episode.departed:
        return episode.departed.replace(f" from {point.attempt_id}", "", 1)
    done, size = _replayed(episode), len(point.prefix)
    if done == size:
        return ""
    end = f": {episode.message}" if episode.message else ""
    return f"the attempt ended after {done} of {plural(size, 'call')}{end}"
