"""Decide whether the best candidate of a search is better by more than chance."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

import msgspec

from lightspan_prompts.search.candidates import Candidate, SearchResult, rounded

MAX_SIGNS: Final = 14
"""Maximum number of gains of which all signs are enumerated."""
DRAWS: Final = 20_000
"""Number of signs that are drawn for more gains."""


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

    It is that of a permutation test (`sign_flip_tail`) over the tasks for which both have a reward,
    corrected for the number of candidates that were compared with the first (Šidák). With n tasks
    it is at least 2^-n, so few tasks cannot tell any gain from chance.
    """
    before, after = _rewards(candidates[0]), _rewards(candidates[best])
    tasks = sorted(before.keys() & after.keys())
    gains = [rounded(after[task]) - rounded(before[task]) for task in tasks]
    return 1 - (1 - sign_flip_tail(gains)) ** (len(candidates) - 1)


def _rewards(candidate: Candidate) -> Mapping[str, float]:
    """Return task → the candidate's mean reward, without the tasks that have none."""
    runs = (candidate.rewards, candidate.again)
    rewards = {task: [run.get(task) for run in runs] for task in candidate.rewards}
    scored = {task: [r for r in pair if r is not None] for task, pair in rewards.items()}
    return {task: fmean(pair) for task, pair in scored.items() if pair}


def sign_flip_tail(gains: Sequence[float]) -> float:
    """Return the probability of a sum of at least that of `gains` if each sign is a coin's.

    If two prompts are equally good on a task, a gain and the loss of the same size are equally
    probable (Fisher 1935, The Design of Experiments, chapter 3). Up to `MAX_SIGNS` gains other than
    0, all signs are enumerated. Beyond that, `DRAWS` signs are drawn, always the same ones, and the
    observed signs count as one more draw.

    Args:
        gains: difference of the two rewards of each task.
    """
    changes = [gain for gain in gains if gain]
    if math.fsum(changes) <= 0:
        return 1.0
    observed = math.fsum(changes) - 1e-9 * math.fsum(map(abs, changes))  # rounding breaks no tie
    if len(changes) <= MAX_SIGNS:
        sums = _signed_sums(changes)
        return sum(one >= observed for one in sums) / len(sums)
    rng, size = random.Random(0), MAX_SIGNS
    parts = [_signed_sums(changes[n : n + size]) for n in range(0, len(changes), size)]
    draws = zip(*(rng.choices(part, k=DRAWS) for part in parts), strict=True)
    hits: int = sum(sum(one) >= observed for one in draws)
    return (hits + 1) / (DRAWS + 1)


def _signed_sums(values: Sequence[float]) -> list[float]:
    """Return the sums of `values` with all combinations of signs."""
    sums = [0.0]
    for value in values:
        sums = [one + sign * value for one in sums for sign in (1, -1)]
    return sums
