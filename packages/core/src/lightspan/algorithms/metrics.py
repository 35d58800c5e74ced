"""Metrics of one iteration, as numbers, and what of them a person has to hear, as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from lightspan.algorithms.protocol import Metrics
from lightspan.lightning.batch import Batch
from lightspan.lightning.episode import Episode
from lightspan.lightning.rollout_checks import app_failed
from lightspan.lightning.rows import Row

GAP_ALARM: Final = 0.05
"""Mean difference of log-probabilities between engine and learner that is worth an alarm. Rounding
alone stays well below; above, the two do not run the same model."""

LOG_RATIO_LIMIT: Final = 20.0
"""Differences of log-probabilities are clamped to ± this, as in the loss."""

_SUMMED: Final = ("tokens", "rows", "skipped", "fresh_tokens", "value_calls")


def rollout_metrics(episodes: Sequence[Episode]) -> Metrics:
    """What the rollouts were like."""
    scored = [episode.reward for episode in episodes if episode.reward is not None]
    metrics: Metrics = {
        "rollouts": len(episodes),
        "scored": len(scored),
        "failed": sum(map(app_failed, episodes)),
        "lost": sum(not episode.finished for episode in episodes),
        "damaged": sum(bool(episode.capture_errors) for episode in episodes),
        "calls": sum(len(episode.calls) for episode in episodes),
    }
    if scored:
        metrics["reward"] = math.fsum(scored) / len(scored)
        metrics |= _reward_error(episodes, metrics["reward"])
    calls: Counter[str] = Counter()
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        of_episode = Counter(call.agent_path for call in episode.calls)
        calls.update(of_episode)
        for path in of_episode if episode.reward is not None else ():
            rewards.setdefault(path, []).append(episode.reward or 0.0)
    metrics |= {f"agent/{path}/calls": count for path, count in sorted(calls.items())}
    means = {path: math.fsum(values) / len(values) for path, values in sorted(rewards.items())}
    return metrics | {f"agent/{path}/reward": mean for path, mean in means.items()}


def _reward_error(episodes: Sequence[Episode], mean: float) -> Metrics:
    """The standard error of the mean reward, over groups: rollouts of one task are alike, and the
    next step has other tasks. None of a single group."""
    groups: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.reward is not None:
            groups.setdefault(episode.group_id, []).append(episode.reward - mean)
    count, scored = len(groups), sum(map(len, groups.values()))
    if count < 2:
        return {}
    squares = math.fsum(math.fsum(parts) ** 2 for parts in groups.values())
    return {"reward_se": math.sqrt(squares * count / (count - 1)) / scored}


def batch_metrics(batch: Batch) -> Metrics:
    """What became of every rollout, group and call."""
    counted = {f"batch/{key}": float(value) for key, value in batch.counters.items()}
    calls = {f"calls/{key}": float(value) for key, value in _coverage(batch).items()}
    added = {f"air/{key}": value for key, value in batch.air.items()}
    added |= {f"overlong/{key}": value for key, value in batch.overlong.items()}
    return counted | calls | added


def _coverage(batch: Batch) -> Counter[str]:
    """What became of the batch's calls → how many."""
    calls: Counter[str] = Counter()
    for coverage in batch.coverages:
        calls.update(coverage.counts())
    return calls


def saw_nothing(batch: Batch) -> bool:
    """Whether AIR had nothing to go by: no signal saw anything in any scored rollout."""
    seen = [value for key, value in batch.air.items() if key.endswith("/seen")]
    return bool(seen) and not any(seen)


def why_nothing(batch: Batch) -> str:
    """Why a batch has no rows."""
    if batch.counters.get("transitions"):
        return "no group varied: nothing to learn from in this step"
    counted = ", ".join(f"{count} {what}" for what, count in _coverage(batch).most_common())
    return f"no call could be trained in this step ({counted or 'there was none'})"


def merge_updates(results: Sequence[Mapping[str, float]]) -> Metrics:
    """The metrics of an iteration from those of its optimiser steps: maxima stay maxima, counts
    are summed, the rest are means.

    The gap between engine and learner is that of the updates which saw tokens of the weights they
    update: later minibatches differ from the engine because they have learned.
    """
    merged: Metrics = {}
    for key in dict.fromkeys(key for result in results for key in result):
        prefix, _, name = key.rpartition("/")
        having = [result for result in results if key in result]
        if name.startswith("logprob_gap"):
            fresh = f"{prefix}/fresh_tokens" if prefix else "fresh_tokens"
            having = [result for result in having if result.get(fresh)] or having
        values = [result[key] for result in having]
        if name.endswith("_max"):
            merged[key] = max(values)
        elif name in _SUMMED:
            merged[key] = math.fsum(values)
        else:
            merged[key] = math.fsum(values) / len(values)
    return merged


def approximate_kl(
    rows: Sequence[Row], before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> float:
    """How far updates moved a policy: KL(before‖after) per trained token of the rows, by the
    estimator k3 of their log-probabilities."""
    moved = [
        max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, new - old))
        for row, olds, news in zip(rows, before, after, strict=True)
        for old, new, is_trained in zip(olds, news, row.mask, strict=True)
        if is_trained
    ]
    return math.fsum(math.expm1(by) - by for by in moved) / len(moved) if moved else 0.0


def alarms(learned: Mapping[str, float]) -> list[str]:
    """What is wrong with an update, for people."""
    notes = []
    gap = learned.get("logprob_gap_mean", 0.0)
    if learned.get("fresh_tokens") and not gap <= GAP_ALARM:  # NaN too
        notes.append(
            f"engine and learner disagree: log-probabilities of the same tokens differ by "
            f"{gap:.3g} on average (at most {GAP_ALARM} is rounding), so that the update is "
            "biased; compare their dtypes and attention implementations"
        )
    skipped = learned.get("skipped", 0.0)
    if skipped:
        were = "update was" if skipped == 1 else "updates were"
        notes.append(
            f"{skipped:.0f} {were} skipped, and changed no weights: {_why_skipped(learned)}"
        )
    return notes


def _why_skipped(learned: Mapping[str, float]) -> str:
    """Why updates were skipped: a mean over updates is not finite where one of them was not."""
    values = {name: learned[name] for name in ("loss", "grad_norm") if name in learned}
    if len(values) == 2 and all(map(math.isfinite, values.values())):
        return "their rows had no token to train"
    shown = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    return (
        f"the loss or the gradient is not finite{f' ({shown})' if shown else ''}; lower "
        "learning_rate if it goes on"
    )
