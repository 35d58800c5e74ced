"""Metrics of one iteration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress
from statistics import fmean
from typing import Final

from lightspan.algorithms.protocol import Metrics
from lightspan.lightning.batch import Batch
from lightspan.lightning.episode import Episode, dimension_means
from lightspan.lightning.rollout_checks import app_failed, failed_with_reward, is_silent
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import PolicyLoss
from lightspan.schema.records import Outcome
from lightspan.schema.routing import Routing

LOG_RATIO_LIMIT: Final = 20.0
"""Differences of log-probabilities are clamped to ± this number, as in the loss."""

_SUMMED: Final = ("tokens", "rows", "skipped", "fresh_tokens", "value_calls")


def rollout_metrics(episodes: Sequence[Episode], routing: Routing | None = None) -> Metrics:
    """Return counts and mean rewards of rollouts, overall and per agent. Forks are left out.

    Args:
        episodes: the rollouts.
        routing: routing of the agents, by which rollouts that asked no trained policy are counted;
            None to count none.
    """
    episodes = [episode for episode in episodes if episode.fork is None]
    scored = [episode.reward for episode in episodes if episode.reward is not None]
    metrics: Metrics = {
        "rollouts": len(episodes),
        "scored": len(scored),
        "failed": sum(map(app_failed, episodes)),
        "failed_scored": sum(map(failed_with_reward, episodes)),
        "lost": sum(not episode.finished for episode in episodes),
        "damaged": sum(bool(episode.capture_errors) for episode in episodes),
        "calls": sum(len(episode.recorded_calls) for episode in episodes),
    }
    if routing is not None and (silent := sum(is_silent(each, routing) for each in episodes)):
        metrics["silent"] = silent
    # a runner that was stopped has given its attempts back: these are not lost
    tries = Counter(each.outcome for episode in episodes for each in episode.earlier)
    if lost := tries[Outcome.INFRASTRUCTURE]:
        metrics["lost_attempts"] = lost
    if scored:
        metrics["reward"] = math.fsum(scored) / len(scored)
        metrics |= _reward_error(episodes, metrics["reward"])
    metrics |= dimension_means(episodes)
    own = [e.reward for e in episodes if e.reward is not None and not app_failed(e)]
    if own and len(own) < len(scored):
        metrics["reward_without_failures"] = math.fsum(own) / len(own)
    calls: Counter[str] = Counter()
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        paths = Counter(call.agent_path for call in episode.recorded_calls)
        calls.update(paths)
        if episode.reward is not None:
            for path in paths:
                rewards.setdefault(path, []).append(episode.reward)
    metrics |= {f"agent/{path}/calls": count for path, count in sorted(calls.items())}
    means = {path: math.fsum(values) / len(values) for path, values in sorted(rewards.items())}
    return metrics | {f"agent/{path}/reward": mean for path, mean in means.items()}


def _reward_error(episodes: Sequence[Episode], mean: float) -> Metrics:
    """Return the standard error of the mean reward as the metric `reward_se`.

    The rollouts of one task (a group) are similar, so the error is computed from sums over groups.
    The result is empty if fewer than two groups have a rollout with a reward.

    Args:
        episodes: episodes of whole groups.
        mean: mean reward of the rollouts that have one.
    """
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
    """Return the metrics of a batch: its counters, and the values of AIR and the length penalty.

    The calls are counted by status, such as `trained`.
    """
    counters = {f"batch/{key}": float(value) for key, value in batch.counters.items()}
    calls: Counter[str] = Counter()
    for coverage in batch.coverages:
        calls.update({f"calls/{status}": count for status, count in coverage.counts().items()})
    air = {f"air/{key}": value for key, value in batch.air.items()}
    overlong = {f"overlong/{key}": value for key, value in batch.overlong.items()}
    return counters | {key: float(count) for key, count in calls.items()} | air | overlong


def merge_updates(results: Sequence[Mapping[str, float]]) -> Metrics:
    """Merge the metrics of several optimiser steps into one mapping.

    Of metrics `*_max` the maximum is kept, counts are added, and of other metrics the mean is
    taken. The gap between the log-probabilities of engine and learner (`logprob_gap*`) is merged
    only over steps with fresh tokens, which were sampled by the weights that the step updates. In
    later minibatches, training itself makes the learner differ from the engine.

    Args:
        results: metrics of each optimiser step.
    """
    merged: Metrics = {}
    for key in dict.fromkeys(key for result in results for key in result):
        prefix, _, name = key.rpartition("/")
        used = [result for result in results if key in result]
        if name.startswith("logprob_gap"):
            fresh = f"{prefix}/fresh_tokens" if prefix else "fresh_tokens"
            used = [result for result in used if result.get(fresh)] or used
        values = [result[key] for result in used]
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
    """Return an estimate of how far an update moved a policy: KL(before‖after) per trained token.

    It uses the estimator k3, which needs tokens that the weights before the update sampled. Tokens
    of older weights (overlap, replay) are not reweighted, and then the result is a distance of the
    two policies on these tokens, and no KL divergence. Of several policies, the result is that of
    the one that moved furthest: a mean would hide a policy with few tokens. It is 0 without trained
    tokens.

    Args:
        rows: scored rows.
        before: per row, the log-probabilities of its tokens before the update.
        after: per row, the log-probabilities of its tokens after the update.
    """
    log_ratios: dict[str, list[float]] = {}
    for row, olds, news in zip(rows, before, after, strict=True):
        log_ratios.setdefault(row.policy, []).extend(compress(_log_ratios(news, olds), row.mask))
    means = (fmean(math.expm1(r) - r for r in each) for each in log_ratios.values() if each)
    return max(means, default=0.0)


def engine_ratio(
    rows: Sequence[Row],
    scores: Sequence[Sequence[float]],
    versions: Mapping[str, int],
    loss: PolicyLoss,
) -> Metrics:
    """Return how much the probabilities of engine and learner differ, from before an update.

    - `engine_ratio_mean`, `engine_ratio_max`: mean and maximum of |log(learner / engine)| over the
      tokens that the current weights sampled; absent if there are none
    - `engine_ratio_truncated`: share of the trained tokens whose importance weight is limited by
      `PolicyLoss.importance_cap`; absent without it
    - `engine_ratio_masked`: the same for tokens of calls above `PolicyLoss.importance_mask`

    Args:
        rows: rows of the update.
        scores: per row, the learner's log-probabilities before the update.
        versions: policy → version of the current weights.
        loss: loss of the update.
    """
    current: list[float] = []
    counts: Counter[str] = Counter()
    for row, logprobs in zip(rows, scores, strict=True):
        logs = _log_ratios(logprobs, row.logprobs)
        counts["trained"] += sum(row.mask)
        version = versions.get(row.policy)
        is_current = [v == version and t for v, t in zip(row.versions, row.mask, strict=True)]
        current += map(abs, compress(logs, is_current))
        calls = [[*compress(logs[a : a + n], row.mask[a : a + n])] for a, n in row.responses]
        tokens = [[log] for log in compress(logs, row.mask)]
        weighted = tokens if loss.importance_level == "token" else calls
        for name, bound, parts in (
            ("truncated", loss.importance_cap, weighted),
            ("masked", loss.importance_mask, calls),
        ):
            if bound is not None:
                above = (len(part) for part in parts if math.fsum(part) > math.log(bound))
                counts[name] += sum(above)
    trained = max(counts.pop("trained", 0), 1)
    shares = {f"engine_ratio_{name}": count / trained for name, count in counts.items()}
    if not current:
        return shares
    mean = math.fsum(current) / len(current)
    return {"engine_ratio_mean": mean, "engine_ratio_max": max(current), **shares}


def _log_ratios(new: Sequence[float], old: Sequence[float]) -> list[float]:
    pairs = zip(new, old, strict=True)
    return [max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, n - o)) for n, o in pairs]
