"""Replay: train groups with rare successes again (ExGRPO, arXiv 2510.02245; RLEP, 2507.07451).

A group whose rollouts seldom succeed teaches much when one of them does, and is trained only once.
With `Replay`, such groups are kept by the ids of their rollouts, and later steps train some of them
again in addition to their new groups. The rollouts are read from the store, with the rewards that
they had, so that a replayed group is what it was:

- its tokens, the log-probabilities with which the engine sampled them, and their policy versions;
- its returns, and hence its mean, deviation and advantages, because they are compared only within
  the group. So estimators whose statistics go over the batch, and critics, are refused.

A replayed group counts like a new one: its scored rollouts are added to the number R by which the
loss is divided, and each has the weight 1 / R. Damaged and rejected calls stay untrained, and
frozen agents stay frozen.

The weights have changed since. As for every token, the loss has the ratio to the recorded
log-probability, or, with `PolicyLoss(importance_cap=)`, a truncated importance weight from the
recorded to the current policy. Both correct for the older policy, within their bounds. Neither
corrects for the choice of groups by their outcome: replay gives rare successes, and the failures
of their groups, more weight than their frequency.

What differs from the publications: both put single successes among new rollouts of the same task,
and normalise over the mixture; here whole groups are replayed. ExGRPO prefers answers of low
entropy and shapes the weights of replayed tokens; RLEP collects the successes in an earlier
training. None of this is done here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from lightspan.algorithms.adaptive_tasks import GroupReturns, ReturnRange, TaskRates
from lightspan.algorithms.protocol import Metrics, TrainerContext
from lightspan.errors import NotFoundError
from lightspan.lightning.episode import Episode
from lightspan.progress import plural
from lightspan.schema.validation import check_number, check_whole

FIELDS: Final = ("reward", "reward_source", "failure_reward")
"""Fields of an episode that the store does not have: a judge's reward, or that of a failed app."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the replay of groups with rare successes (`lightspan.algorithms.replay`).

    Args:
        groups: maximum number of groups that a step replays.
        rare: maximum mean return of a group that is kept, on a scale from 0, the lowest return of
            the run so far, to 1, the highest. Groups without a gradient are never kept.
        max_age: maximum number of steps between the first training of a group and its replay. Each
            step publishes one version of the weights.
        size: maximum number of groups that are kept, at least `groups`. The oldest is dropped
            first.

    Raises:
        ConfigError: a number is outside its range.
    """

    groups: int = 2
    rare: float = 0.25
    max_age: int = 8
    size: int = 64

    def __post_init__(self) -> None:
        check_whole("Replay: groups", self.groups, 1)
        check_whole("Replay: max_age", self.max_age, 1)
        check_whole(f"Replay(groups={self.groups}): size", self.size, self.groups)
        check_number("Replay: rare", self.rare, above=0, high=1)


class ReplayGroup(msgspec.Struct):
    """A group that may be replayed."""

    group_id: str
    step: int
    """Step that trained it first."""
    rewards: dict[str, list[Any]]
    """Rollout id → values of the `FIELDS` of its episode."""
    replays: int = 0


class GroupHistory(TaskRates):
    """What a run remembers of its groups: success rates of tasks, and groups to replay.

    There is at most one group per task: a group replaces an earlier group of its task, and a group
    in which successes are not rare any more removes it. A checkpoint contains the history.
    """

    returns: ReturnRange = msgspec.field(default_factory=ReturnRange)
    replays: dict[str, ReplayGroup] = msgspec.field(default_factory=dict)
    """Task id → group that may be replayed, the oldest first."""

    async def take_replays(
        self, trainer: TrainerContext, settings: Replay, is_alone: bool
    ) -> tuple[list[Episode], Metrics]:
        """Return the episodes of the groups that this step replays, and metrics of them.

        They are the groups that were replayed least often and, among these, the newest. The
        episodes have the rewards that they had. Groups that are too old are removed. So is a group
        whose rollouts are no longer in the store; a note is printed.

        Args:
            trainer: the running trainer.
            settings: settings of the replay.
            is_alone: whether no call of the step's new rollouts can be trained. Then no group is
                replayed, so that no update consists of old rollouts alone; a note is printed.
        """
        episodes, ages = list[Episode](), list[int]()
        oldest = trainer.step - settings.max_age
        self.replays = {task: one for task, one in self.replays.items() if one.step >= oldest}
        order = sorted(self.replays.items(), key=lambda item: (item[1].replays, -item[1].step))
        chosen = [] if is_alone else order[: settings.groups]
        if idle := min(settings.groups, len(order)) - len(chosen):
            trainer.note(
                f"replay: {plural(idle, 'group')} not trained again, because no call of the "
                "step's new rollouts can be trained"
            )
        for task, group in chosen:
            try:
                members = await trainer.stored_episodes(list(group.rewards))
            except NotFoundError:
                del self.replays[task]
                trainer.note(f"replay: group {group.group_id} is no longer in the store")
                continue
            group.replays += 1
            ages.append(trainer.step - group.step)
            for each in members:
                own = dict(zip(FIELDS, group.rewards[each.rollout_id], strict=True))
                episodes.append(replace(each, **own))
        age = sum(ages) / max(1, len(ages))
        return episodes, {"replay/groups": len(ages), "replay/age": age, "replay/withheld": idle}

    def add_replays(self, step: int, groups: Sequence[GroupReturns], settings: Replay) -> None:
        """Keep the groups of a step in which successes are rare.

        Args:
            step: number of the step.
            groups: the new groups of the step, without replayed ones.
            settings: settings of the replay.
        """
        for group in groups:
            shares = [self.returns.scale(value) for value in group.returns]
            is_rare = math.fsum(shares) <= settings.rare * len(shares)
            if group.has_gradient or not is_rare:
                self.replays.pop(group.task_id, None)
            if group.has_gradient and is_rare:
                rewards = {e.rollout_id: [getattr(e, k) for k in FIELDS] for e in group.episodes}
                name = group.episodes[0].group_id
                self.replays[group.task_id] = ReplayGroup(name, step, rewards)
        self.replays = dict(list(self.replays.items())[-settings.size :])
