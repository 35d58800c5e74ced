"""A rollout in memory: its summary, its reward and step in the run, and the facts of its spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lightspan.lightning.episode import score_failure
from lightspan.schema.records import Mode, RolloutStatus, RolloutSummary
from lightspan.training.rewards import Scored, with_reward
from lightspan_ui import views
from lightspan_ui.facts import Facts, Texts, beginning, episode_of


class Entry:
    """A rollout of a store.

    Args:
        summary: the rollout with its latest attempt.
    """

    __slots__ = ("dimensions", "facts", "reward", "step", "summary")

    def __init__(self, summary: RolloutSummary) -> None:
        self.summary = summary
        self.facts: Facts | None = None
        """None while the spans were not read."""
        self.step = summary.step
        self.reward: float | None = None
        self.dimensions: Mapping[str, float] = {}

    @property
    def group(self) -> str:
        return self.summary.group_id or self.summary.task_id

    @property
    def started(self) -> float:
        """When the attempt began, or else when the rollout was queued."""
        return self.summary.started_at or self.summary.created_at

    @property
    def is_rated(self) -> bool:
        return self.summary.feedback is not None or (self.facts is not None and self.facts.is_rated)

    @property
    def tokens(self) -> int | None:
        return None if self.facts is None else self.facts.tokens

    @property
    def cost(self) -> float | None:
        return None if self.facts is None else self.facts.cost

    @property
    def seconds(self) -> float | None:
        """Seconds of the attempt; None while it runs."""
        if self.facts is not None and self.facts.seconds is not None:
            return self.facts.seconds
        start, end = self.summary.started_at, self.summary.ended_at
        return None if start is None or end is None else end - start

    @property
    def is_readable(self) -> bool:
        """Whether the attempt has spans that will not change."""
        return self.summary.attempt_id is not None and self.summary.status.final


_UNCHANGED: Final = (RolloutStatus.SUCCEEDED, RolloutStatus.RUNNING, RolloutStatus.QUEUED)
"""Statuses of rollouts whose reward is the recorded one, unless a judge or function scores."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a run computes rewards and steps from what its store has.

    For a store of production, all fields have their defaults.
    """

    rewards: Mapping[str, Scored] | None = None
    """Rollout id → score of the run's judge or function; None if the app's own rewards count."""
    failure_reward: Callable[[Mode, int], float | None] = lambda mode, step: None
    """Returns the reward of a failed rollout; None if failures are unscored."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Group → step that trained it, of groups that were enqueued ahead."""

    def apply(self, entry: Entry) -> None:
        """Set the reward and the step of an entry, as `lightspan inspect` shows them."""
        summary = entry.summary
        entry.step = self.steps.get(summary.group_id, summary.step)
        if summary.attempt_id is None:
            return
        if summary.mode is Mode.PRODUCTION:
            _set_recorded(entry)
            return
        if self.rewards is None and summary.status in _UNCHANGED:  # by far the most
            _set_recorded(entry)
            return
        episode = episode_of(summary, entry.facts)
        if self.rewards is not None:
            episode = with_reward(episode, self.rewards.get(summary.rollout_id))
        episode = score_failure(episode, self.failure_reward(summary.mode, entry.step))
        entry.reward, entry.dimensions = episode.reward, episode.dimensions

    def changes(self, earlier: Scoring, entry: Entry) -> bool:
        """Return whether an entry may have another reward or step than by an earlier scoring."""
        summary, name = entry.summary, entry.summary.rollout_id
        if summary.status is RolloutStatus.FAILED or entry.step != self.steps.get(
            summary.group_id, summary.step
        ):
            return True
        return (self.rewards or {}).get(name) != (earlier.rewards or {}).get(name)


def _set_recorded(entry: Entry) -> None:
    """Set the reward that was recorded, by its spans if they were read."""
    summary, facts = entry.summary, entry.facts
    feedback = summary.feedback if summary.mode is Mode.PRODUCTION else None
    reward = feedback or summary.reward
    if facts is not None:
        entry.reward, entry.dimensions = facts.reward, facts.dimensions or {}
    elif reward is not None and not (summary.fork is not None and summary.capture_errors):
        entry.reward, entry.dimensions = reward.value, reward.dimensions


def _status_of(entry: Entry) -> str:
    """Return the status of a rollout; `departed` if it does not repeat what it was forked from."""
    has_departed = entry.facts is not None and entry.facts.departed
    return "departed" if has_departed else str(entry.summary.status)


def row_of(entry: Entry, task: str, texts: Texts | None) -> views.RolloutRow:
    """Return an entry as a row of a table.

    Args:
        entry: the rollout.
        task: the task as text.
        texts: beginnings of its texts; None if its spans were not read.
    """
    summary, facts = entry.summary, entry.facts
    return views.RolloutRow(
        rollout_id=summary.rollout_id,
        run_id=summary.run_id,
        mode=str(summary.mode),
        step=entry.step,
        group=entry.group,
        task_id=summary.task_id,
        status=_status_of(entry),
        created=summary.created_at,
        attempt_id=summary.attempt_id or "",
        outcome=str(summary.outcome or ""),
        message=summary.message,
        reward=entry.reward,
        dimensions=dict(entry.dimensions),
        started=summary.started_at,
        seconds=entry.seconds,
        damaged=summary.capture_errors,
        fork_of="" if summary.fork is None else summary.fork.rollout_id,
        fork_call="" if summary.fork is None else summary.fork.call_id,
        rated=entry.is_rated,
        is_read=facts is not None,
        task=beginning(task),
        question="" if texts is None else texts.question,
        answer="" if texts is None else texts.answer,
        agents={} if facts is None else dict(facts.agents),
        tokens=entry.tokens,
        cost=entry.cost,
        user="" if facts is None else facts.user,
        session="" if facts is None else facts.session,
        tags=[] if facts is None else list(facts.tags),
    )
