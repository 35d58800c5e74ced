"""Decide whether the best candidate of a search is better by more than chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

import msgspec

from lightspan_prompts.search.candidates import Candidate, SearchResult


def judged(found: SearchResult, significance: float | None) -> SearchResult:
    """Add the probability of the best candidate's gain by chance alone to a search's result.

    If the probability is above `significance`, the initial prompts become the chosen candidate.

    Args:
        found: a result, whose `chosen` is the best candidate.
        significance: highest probability at which the best candidate is chosen; None to choose it
            in any case.
    """
    best = found.chosen
    if not best:
        return found
    chance = chance_of(found.candidates, best)
    compared = _rewards(found.candidates[0]).keys() & _rewards(found.candidates[best]).keys()
    is_kept = significance is not None and chance > significance
    return msgspec.structs.replace(
        found,
        best=best,
        chance=chance,
        left_out=len(found.candidates[0].rewards) - len(compared),
        significance=significance,
        chosen=0 if is_kept else best,
    )


def chance_of(candidates: Sequence[Candidate], best: int) -> float:
    """Return the probability of the best candidate's gain if all prompts were equally good.

    Two one-sided t-tests over the tasks for which both have a reward are made: one of the
    differences per task, and one of the two groups of rewards (Welch). The lower probability is
    corrected for the number of candidates and for the second test (Šidák). With few tasks it has a
    lower limit, because a t-test of rewards without variance gives 0.
    """
    before, after = _rewards(candidates[0]), _rewards(candidates[best])
    tasks = before.keys() & after.keys()
    if len(tasks) < 2:
        return 1.0
    one, two = [before[task] for task in tasks], [after[task] for task in tasks]
    pairs = [b - a for a, b in zip(one, two, strict=True)]
    count = len(tasks)
    gain = fmean(pairs)
    paired = _tail(gain, variance(pairs) / count, count - 1)
    parts = [variance(one) / count, variance(two) / count]
    spread = math.fsum(part**2 for part in parts)
    freedom = math.fsum(parts) ** 2 * (count - 1) / spread if spread else count - 1
    chance = max(min(paired, _tail(gain, math.fsum(parts), int(freedom))), 4.0**-count)
    return -math.expm1(len(candidates) * math.log1p(-min(chance, 1 - 1e-12)))


def _rewards(candidate: Candidate) -> Mapping[str, float]:
    """Return task → the candidate's mean reward, without the tasks that have none."""
    runs = (candidate.rewards, candidate.again)
    rewards = {task: [run.get(task) for run in runs] for task in candidate.rewards}
    scored = {task: [r for r in pair if r is not None] for task, pair in rewards.items()}
    return {task: fmean(pair) for task, pair in scored.items() if pair}


def _tail(mean: float, squared_error: float, freedom: int) -> float:
    """Return the probability of a mean of at least `mean` in a t-test, if the true mean is 0."""
    if mean <= 0:
        return 1.0
    if squared_error == 0:
        return 0.0
    return student_tail(mean / math.sqrt(squared_error), freedom)


def student_tail(t: float, freedom: int) -> float:
    """Return the probability that a value of Student's t-distribution is above `t`.

    `t` is at least 0. The formulas are those of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    if freedom % 2:
        term, total = cosine, 0.0
        for n in range(3, freedom + 1, 2):
            total += term
            term *= cosine**2 * (n - 1) / n
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        term, total = 1.0, 0.0
        for n in range(2, freedom + 1, 2):
            total += term
            term *= cosine**2 * (n - 1) / n
        inside = math.sin(angle) * total
    return max(0.0, (1 - inside) / 2)
