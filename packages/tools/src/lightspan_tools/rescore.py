"""`lightspan rescore`: a run's rollouts under another reward, and what that would change.

The run stays as it is, its rewards, its store and what its judge has answered. Asked for, the new
reward is kept beside the old one, under a name of its own.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.errors import ConfigError, DataError
from lightspan.lightning.episode import Episode
from lightspan.progress import Reporter, plural, print_line
from lightspan.schema.records import Json, Mode
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
from lightspan_tools.rollout_view import trained_rewards

PORTION: Final = 256
"""Rollouts that are in memory at once, and as many more as their last group has."""
EQUAL: Final = 1e-9
"""Rewards, and advantages, that differ by no more count as equal."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout under both rewards."""

    rollout_id: str
    task_id: str
    group_id: str
    mode: str
    step: int
    before: float | None
    """None: unscored."""
    after: float | None
    why: str = ""
    """Why it is unscored after."""

    @property
    def size(self) -> float:
        if self.before is None or self.after is None:
            return 0.0
        return abs(self.after - self.before)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What another reward would change for the rollouts of one mode."""

    mode: str
    rollouts: int
    both: int
    """Scored under either reward: means and signs are of these."""
    unscored_before: int
    unscored_after: int
    mean_before: float | None
    mean_after: float | None
    compared: int
    """Of those scored both times, the ones that another one of their group is compared with."""
    sign_changes: int
    """Whose advantage (reward minus the group's mean) has another sign; 0 is a sign of its own."""
    reasons: dict[str, int] = {}
    """Why rollouts are unscored after → how many."""


class Rescoring(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    run: str
    before: str
    """The reward that was learned from: `app`, or that of a judge or a function."""
    after: str
    comparisons: list[Comparison]
    changes: list[Change]
    """Every rollout."""
    spent: dict[str, float] = {}
    """What a judge was asked now: `calls`, `tokens`."""
    written: str = ""
    """The name under which the run has the new reward now; empty: nothing was written."""

    def json(self, limit: int) -> dict[str, Json]:
        """As JSON values, with the most changed rollouts."""
        plain: dict[str, Json] = msgspec.to_builtins(self)
        return {**plain, "changes": msgspec.to_builtins(most_changed(self.changes, limit))}

    def text(self, limit: int) -> str:
        return "\n".join(_lines(self, limit))


def rescore(
    folder: Path,
    reward: Scorer | str | Any,
    *,
    mode: Mode | None = None,
    write: str | None = None,
    reporter: Reporter | None = None,
) -> Rescoring:
    """Score a run's rollouts again.

    Args:
        folder: of the run.
        reward: as for `Trainer(reward=)`.
        mode: only rollouts of this mode; None: of training and evaluation.
        write: the name under which the run is to have the new reward beside the others. Without it
            nothing is written, what a judge answers included.
        reporter: where notes go; None for the error output.

    Raises:
        ConfigError: the folder is no run, has a reward of this name already, or is to be written
            while somebody trains in it.
        AppError: the reward cannot be imported.
        DataError: the run has no rollout of this mode.
        RewardError: what the function returns is no reward.
        BudgetError, EngineError: as a judge raises them.
    """
    scorer, run = as_scorer(reward), RunFolder(folder)
    config = run.read_config()
    if write is not None:
        check_reward_name(write)
        if write in run.reward_names():
            raise ConfigError(
                f"{folder} has a reward {write!r} already, and rescore replaces none: give "
                "another name"
            )
    place = ScoringPosition(run.path, keeps=write is not None, note=_noted(reporter))
    if write is None:
        return run_sync(_rescore(run, config, scorer, place, mode))[0]
    run.create()  # nobody may train there: a judge's answers go into one file
    try:
        result, scored = run_sync(_rescore(run, config, scorer, place, mode))
        run.add_rewards(write, scored)
    finally:
        run.release()
    return msgspec.structs.replace(result, written=write)


def _noted(reporter: Reporter | None) -> Any:
    return reporter.line if reporter is not None else lambda text: print_line(text, sys.stderr)


async def _rescore(
    run: RunFolder,
    config: Mapping[str, Any],
    scorer: Scorer,
    place: ScoringPosition,
    mode: Mode | None,
) -> tuple[Rescoring, dict[str, Scored]]:
    failure_reward = config.get("failure_reward")
    trained = trained_rewards(run, config)
    taken = run.taken()
    changes: list[Change] = []
    given: dict[str, Scored] = {}
    async with (
        open_existing(config.get("store") or run.store_url) as store,
        scorer.opened(place) as scoring,
    ):
        states = [
            state
            for state in await store.rollouts(run_id=config.get("run_id"))
            if state.status.final and state.rollout.mode in _modes(mode)
        ]
        states.sort(key=lambda state: (state.rollout.step, state.rollout.group_id))
        for part in _portions(states):
            episodes = await read_episodes(store, part, failure_reward=failure_reward)
            members = [Member(s.rollout.task, e) for s, e in zip(part, episodes, strict=True)]
            scored = await scored_groups(scoring, members)
            given |= scored
            for state, episode in zip(part, episodes, strict=True):
                before = episode
                if trained is not None:
                    kept = trained.get(episode.rollout_id)
                    before = with_reward(episode, kept, failure_reward=failure_reward)
                after = with_reward(
                    episode, scored.get(episode.rollout_id), failure_reward=failure_reward
                )
                step = taken.get(state.rollout.group_id or "", state.rollout.step)
                changes.append(_change(before, after, step))
        spent = dict(scoring.spent())
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
        given,
    )


def _modes(mode: Mode | None) -> tuple[Mode, ...]:
    return (Mode.TRAIN, Mode.VAL) if mode is None else (mode,)


def _portions(states: Sequence[Any]) -> Iterator[list[Any]]:
    """Nearly equal parts that leave groups whole."""
    part: list[Any] = []
    for state in states:
        group = state.rollout.group_id
        if len(part) >= PORTION and part[-1].rollout.group_id != group:
            yield part
            part = []
        part.append(state)
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


# --- what it would change ---------------------------------------------------------------------
def compare(changes: Sequence[Change]) -> list[Comparison]:
    """What the new reward would change, by mode."""
    by_mode: dict[str, list[Change]] = {}
    for change in changes:
        by_mode.setdefault(change.mode, []).append(change)
    return [_comparison(mode, of_mode) for mode, of_mode in sorted(by_mode.items())]


def _comparison(mode: str, changes: Sequence[Change]) -> Comparison:
    both = [each for each in changes if each.before is not None and each.after is not None]
    groups: dict[str, list[Change]] = {}
    for change in both:
        groups.setdefault(change.group_id, []).append(change)
    compared = signs = 0
    for group in groups.values():
        if len(group) > 1:
            compared += len(group)
            before = [each.before or 0.0 for each in group]
            after = [each.after or 0.0 for each in group]
            signs += sum(a != b for a, b in zip(_signs(before), _signs(after), strict=True))
    return Comparison(
        mode=mode,
        rollouts=len(changes),
        both=len(both),
        unscored_before=sum(each.before is None for each in changes),
        unscored_after=sum(each.after is None for each in changes),
        mean_before=_mean([each.before for each in both]),
        mean_after=_mean([each.after for each in both]),
        compared=compared,
        sign_changes=signs,
        reasons=dict(Counter(each.why for each in changes if each.after is None).most_common()),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _signs(rewards: Sequence[float]) -> list[int]:
    mean = math.fsum(rewards) / len(rewards)
    return [(r - mean > EQUAL) - (r - mean < -EQUAL) for r in rewards]


def most_changed(changes: Sequence[Change], limit: int) -> list[Change]:
    """Those whose reward differs most, the largest difference first."""
    differing = [each for each in changes if each.size > EQUAL]
    return sorted(differing, key=lambda each: (-each.size, each.rollout_id))[: limit or None]


# --- for people -------------------------------------------------------------------------------
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
    width = max((len(names[each.rollout_id]) for each in shown), default=0)
    for each in shown:
        yield (
            f"  {names[each.rollout_id]:<{width}}  {each.mode:<5}  step {each.step}  task "
            f"{each.task_id}  {each.before:.6g} -> {each.after:.6g}"
        )
    if rescoring.spent:
        calls, tokens = (int(rescoring.spent[name]) for name in ("calls", "tokens"))
        yield f"the judge was asked {plural(calls, 'question')}, {tokens:,} tokens"
    if rescoring.written:
        yield f"kept in the run as the reward {rescoring.written}, beside the others"
    else:
        yield "nothing was written (--write NAME keeps the new reward beside the others)"


def _comparison_lines(each: Comparison) -> Iterator[str]:
    means = "no rollout is scored by both"
    if each.mean_before is not None and each.mean_after is not None:
        means = f"mean {each.mean_before:.3f} -> {each.mean_after:.3f} ({each.both} scored by both)"
    yield (
        f"{each.mode}, {plural(each.rollouts, 'rollout')}: {means}; unscored "
        f"{each.unscored_before} -> {each.unscored_after}"
    )
    if each.compared:
        yield (
            f"  in their groups: {each.sign_changes} of {each.compared} get an advantage of "
            "another sign"
        )
    yield from (f"  unscored: {count} {reason}" for reason, count in each.reasons.items())
