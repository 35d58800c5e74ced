"""Score the rollouts of a run with another reward, and compare it with the reward in training.

The rewards, store and judge answers of the run are not changed. If asked to, store the new reward
in the run under another name.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.errors import ConfigError, DataError
from lightspan.lightning.episode import Episode, score_failure
from lightspan.progress import plural, print_line
from lightspan.schema.records import Json, Mode, RolloutState
from lightspan.stores import open_existing
from lightspan.stores.aio import run_sync
from lightspan.training.collector import read_episodes
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import (
    OWN,
    Member,
    Scored,
    Scorer,
    ScoringPosition,
    as_scorer,
    check_reward_name,
    scored_groups,
    with_reward,
)
from lightspan_tools.pagination import short_ids
from lightspan_tools.rollout_view import (
    failure_rewards,
    reward_names,
    trained_rewards,
    training_steps,
)

PORTION: Final = 256
"""Number of rollouts that are in memory at once; the last group may exceed it."""
EQUAL: Final = 1e-9
"""Maximum difference of rewards and advantages that count as equal."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of a rollout before and after rescoring."""

    rollout_id: str
    task_id: str
    group_id: str
    mode: str
    step: int
    before: float | None
    """The reward in training; None if the rollout was unscored."""
    after: float | None
    why: str = ""
    """Why the rollout is unscored under the new reward."""

    @property
    def size(self) -> float:
        if self.before is None or self.after is None:
            return 0.0
        return abs(self.after - self.before)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the reward in training with the new reward, for the rollouts of one mode."""

    mode: str
    rollouts: int
    both: int
    """Number of rollouts scored under both rewards, over which means and signs are computed."""
    unscored_before: int
    unscored_after: int
    mean_before: float | None
    mean_after: float | None
    compared: int
    """Number of rollouts scored under both rewards in groups of at least two."""
    sign_changes: int
    """Number of rollouts whose advantage (reward minus the group's mean) changes its sign, of -1, 0
    and 1."""
    reasons: dict[str, int] = {}
    """Reason → number of rollouts that are unscored under the new reward."""


class Rescoring(msgspec.Struct, frozen=True, kw_only=True):
    """The result of scoring the rollouts of a run with another reward."""

    run: str
    before: str
    """Name of the reward in training: `app`, or the name of a judge or a function."""
    after: str
    comparisons: list[Comparison]
    changes: list[Change]
    """Rewards of every rollout, changed or not."""
    spent: dict[str, float] = {}
    """Costs of the judge: `calls` and `tokens`; empty without a judge."""
    written: str = ""
    """Name under which the new reward was stored in the run; empty if it was not stored."""

    def json(self, limit: int) -> dict[str, Json]:
        """Return the result as JSON values. Its `changes` has only rollouts whose reward changed.

        Args:
            limit: maximum number of these rollouts, those with the largest changes; 0 for no
                maximum.
        """
        plain: dict[str, Json] = msgspec.to_builtins(self)
        return {**plain, "changes": msgspec.to_builtins(most_changed(self.changes, limit))}

    def text(self, limit: int) -> str:
        return "\n".join(_lines(self, limit))


def rescore(
    folder: Path, reward: Scorer | str | Any, *, mode: Mode | None = None, write: str | None = None
) -> Rescoring:
    """Score the rollouts of a run with another reward, and compare it with the reward in training.

    Args:
        folder: folder of the run.
        reward: the new reward, in any form that `Trainer(reward=)` accepts.
        mode: mode of the rollouts to score; None for training and evaluation.
        write: name under which to store the new reward in the run. None stores nothing, not even a
            judge's answers.

    Raises:
        ConfigError: the folder holds no run, the run already has a reward named `write`, or `write`
            is set while another process trains in the folder.
        AppError: the reward cannot be imported.
        DataError: the run has no rollout of this mode.
        RewardError: `reward` is a function and returned an invalid reward.
        BudgetError, EngineError: see `Scoring.score`.
    """
    scorer, run = as_scorer(reward), RunFolder(folder)
    config = run.read_config()
    if write is not None:
        check_reward_name(write)
        if write in reward_names(run):
            raise ConfigError(
                f"{folder} has a reward {write!r} already, and rescore replaces none: give "
                "another name"
            )
    note = partial(print_line, stream=sys.stderr)
    place = ScoringPosition(run.path, keeps=write is not None, note=note)
    if write is None:
        return run_sync(_rescore(run, config, scorer, place, mode))[0]
    run.create()  # locks out trainers, whose judge would write into the same file
    try:
        result, scored = run_sync(_rescore(run, config, scorer, place, mode))
        run.add_rewards(write, scored)
    finally:
        run.release()
    return msgspec.structs.replace(result, written=write)


async def _rescore(
    run: RunFolder,
    config: Mapping[str, Any],
    scorer: Scorer,
    place: ScoringPosition,
    mode: Mode | None,
) -> tuple[Rescoring, dict[str, Scored]]:
    failure_reward = failure_rewards(run, config)
    modes = (Mode.TRAIN, Mode.VAL) if mode is None else (mode,)
    trained = trained_rewards(run, config)
    trained_in = training_steps(run)
    changes: list[Change] = []
    scores: dict[str, Scored] = {}
    async with (
        open_existing(config.get("store") or run.store_url) as store,
        scorer.opened(place._replace(images=store.images)) as scoring,
    ):
        spent_before = dict(scoring.spent())
        states = [
            state
            for state in await store.rollouts(run_id=config.get("run_id"))
            if state.status.final and state.rollout.mode in modes
        ]
        states.sort(key=lambda state: (state.rollout.step, state.rollout.group_id))
        for part in _portions(states):
            episodes = await read_episodes(store, part)
            members = [Member(s.rollout.task, e) for s, e in zip(part, episodes, strict=True)]
            scores |= await scored_groups(scoring, members)
            for state, episode in zip(part, episodes, strict=True):
                rollout, before = state.rollout, episode
                if trained is not None:
                    earlier = trained.get(rollout.rollout_id)
                    before = with_reward(episode, earlier)
                after = with_reward(episode, scores.get(rollout.rollout_id))
                step = trained_in.get(rollout.group_id or "", rollout.step)
                failed = failure_reward(rollout.mode, step)
                before, after = score_failure(before, failed), score_failure(after, failed)
                changes.append(_change(before, after, step))
        spent = {name: value - spent_before[name] for name, value in scoring.spent().items()}
    if not changes:
        raise DataError(f"{run.path} has no rollout{f' of mode {mode}' if mode else ''} to score")
    return (
        Rescoring(
            run=str(run.path),
            before=OWN if trained is None else str(config["reward"]["name"]),
            after=scorer.name,
            comparisons=compare(changes),
            changes=changes,
            spent=spent,
        ),
        scores,
    )


def _portions(states: Sequence[RolloutState]) -> Iterator[list[RolloutState]]:
    """Divide rollouts into lists of about `PORTION`. Rollouts of one group stay together.

    Args:
        states: the rollouts, sorted so that those of one group are consecutive.
    """
    part: list[RolloutState] = []
    for _, group in groupby(states, key=lambda state: state.rollout.group_id):
        part += group
        if len(part) >= PORTION:
            yield part
            part = []
    if part:
        yield part


def _change(before: Episode, after: Episode, step: int) -> Change:
    why = after.unscored or after.message or "the app gave none"
    return Change(
        rollout_id=before.rollout_id,
        task_id=before.task_id,
        group_id=before.group_id,
        mode=str(before.mode),
        step=step,
        before=before.reward,
        after=after.reward,
        why="" if after.reward is not None else why,
    )


# --- comparison -------------------------------------------------------------------------------
def compare(changes: Sequence[Change]) -> list[Comparison]:
    """Compare the rewards before and after, separately for each mode (such as training)."""
    by_mode: defaultdict[str, list[Change]] = defaultdict(list)
    for change in changes:
        by_mode[change.mode].append(change)
    return [_comparison(mode, mode_changes) for mode, mode_changes in sorted(by_mode.items())]


def _comparison(mode: str, changes: Sequence[Change]) -> Comparison:
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for change in changes:
        if change.before is not None and change.after is not None:
            pairs[change.group_id].append((change.before, change.after))
    compared = sign_changes = 0
    for group in pairs.values():
        if len(group) > 1:
            compared += len(group)
            before, after = map(_signs, zip(*group, strict=True))
            sign_changes += sum(a != b for a, b in zip(before, after, strict=True))
    both = [pair for group in pairs.values() for pair in group]
    return Comparison(
        mode=mode,
        rollouts=len(changes),
        both=len(both),
        unscored_before=sum(change.before is None for change in changes),
        unscored_after=sum(change.after is None for change in changes),
        mean_before=_mean([before for before, _ in both]),
        mean_after=_mean([after for _, after in both]),
        compared=compared,
        sign_changes=sign_changes,
        reasons=dict(Counter(c.why for c in changes if c.after is None).most_common()),
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _signs(rewards: Sequence[float]) -> list[int]:
    mean = math.fsum(rewards) / len(rewards)
    return [(r - mean > EQUAL) - (r - mean < -EQUAL) for r in rewards]


def most_changed(changes: Sequence[Change], limit: int) -> list[Change]:
    """Return the rollouts whose reward changed, the largest change first.

    Args:
        changes: the rollouts.
        limit: maximum number of rollouts to return; 0 to return all.
    """
    changed = [change for change in changes if change.size > EQUAL]
    return sorted(changed, key=lambda change: (-change.size, change.rollout_id))[: limit or None]


# --- text -------------------------------------------------------------------------------------
def _lines(rescoring: Rescoring, limit: int) -> Iterator[str]:
    yield f"{rescoring.run}: the reward {rescoring.after} in place of {rescoring.before}"
    for comparison in rescoring.comparisons:
        yield from _comparison_lines(comparison)
    names = short_ids([change.rollout_id for change in rescoring.changes])
    changed = most_changed(rescoring.changes, 0)
    shown = changed[: limit or None]
    yield (
        f"{len(changed)} of {plural(len(names), 'rollout')} would have another reward"
        + (", the most changed:" if shown else "")
    )
    width = max((len(names[change.rollout_id]) for change in shown), default=0)
    for change in shown:
        yield (
            f"  {names[change.rollout_id]:<{width}}  {change.mode:<5}  step {change.step}  task "
            f"{change.task_id}  {change.before:.6g} -> {change.after:.6g}"
        )
    if rescoring.spent:
        calls, tokens = (int(rescoring.spent[name]) for name in ("calls", "tokens"))
        yield f"the judge was asked {plural(calls, 'question')}, {tokens:,} tokens"
    if rescoring.written:
        yield f"stored in the run as the reward {rescoring.written}"
    else:
        yield "nothing was written (--write NAME stores the new reward in the run)"


def _comparison_lines(c: Comparison) -> Iterator[str]:
    means = "no rollout is scored by both"
    if c.mean_before is not None and c.mean_after is not None:
        means = f"mean {c.mean_before:.3f} -> {c.mean_after:.3f} ({c.both} scored by both)"
    yield (
        f"{c.mode}, {plural(c.rollouts, 'rollout')}: {means}; unscored "
        f"{c.unscored_before} -> {c.unscored_after}"
    )
    if c.compared:
        yield (
            f"  in their groups: {c.sign_changes} of {c.compared} get an advantage of another sign"
        )
    yield from (f"  unscored: {count} {reason}" for reason, count in c.reasons.items())
