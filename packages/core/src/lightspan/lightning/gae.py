"""Values: what a critic's numbers make of an episode, by the causal order of its calls.

A critic says V(c), the reward-to-go expected at the prompt of call c. With S(c), the calls that
follow c directly, d the difference of their turns, G the reward-to-go of
`lightspan.lightning.credit`, and means over S(c) that are 0 where nothing follows,

    rho(c) = G(c) - mean gamma^d G(j)                                    what came between
    A(c) = rho(c) + mean gamma^d V(j) - V(c) + lambda · mean gamma^d A(j)

is generalised advantage estimation (arXiv 1506.02438) with one step per *call*; verl's and most
others' is per token. In a chain it is the usual recursion. With lambda 1 it is G - V on any graph,
which is right whatever V is; below 1 it is less noisy and as wrong as V is.

*Directly*: j starts after c ended, and no call lies wholly between. So a branch that runs beside
others is followed by what waits for it, not by whatever comes next by turn (gateway sequence
numbers as intervals):

    plan  [1, 2]                               S: X1, Y
    X1          [3, 5]                         S: X2
    Y             [4,         8]               S: join
    X2                  [6, 7]                 S: join
    join                        [9, 10]        S: nothing

Calls without a value (those that were rejected: no learner sees them) are left out before S is
made, so what came before such a call is followed by what came after it: to the policy it was a part
of the environment. Their rewards and their turns still count, in G and d. A call without sequence
has no place in the causal order: nothing follows from it, it follows from nothing, and A = G - V.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

from lightspan.errors import DataError
from lightspan.lightning.advantages import identical
from lightspan.lightning.episode import Call, CallKey
from lightspan.lightning.rows import Row
from lightspan.lightning.transitions import turn_depths

DEFAULT_LAMBDA: Final = 0.95
TRUSTED_VARIANCE: Final = 0.2
"""The part of the variance of the rewards-to-go that values have to explain before they are built
on. From an untrained head, training with lambda 0.5 collapsed in 2 of 2 runs."""


def gae(
    calls: Sequence[Call],
    to_go: Mapping[CallKey, float],
    values: Mapping[CallKey, float],
    *,
    gamma: float = 1.0,
    lam: float = DEFAULT_LAMBDA,
) -> dict[CallKey, float]:
    """The advantage of each call that has a value (see the module); not divided by any scale.

    Shaping by potentials changes nothing: `to_go` - Phi with `values` - Phi gives the same.

    Args:
        calls: the selected calls of an episode, in causal order, rejected ones too.
        to_go: G of each call, such as `Discounted(gamma)` says.
        values: V of those calls that have one.
        gamma: the discount per turn that `to_go` was made with.
        lam: lambda, from 0 (V alone speaks of what follows) to 1 (G alone does).

    Raises:
        DataError: a value is of no call of these, is no finite number, or its call has no `to_go`.
    """
    turns = {call.key: turn for call, turn in zip(calls, turn_depths(calls), strict=True)}
    for key, value in values.items():
        if key not in turns or key not in to_go or not math.isfinite(value):
            raise DataError(f"call {key}: a value needs its call, its reward-to-go, and a number")
    valued = [call for call in calls if call.key in values]
    following = successors(valued)
    advantages: dict[CallKey, float] = {}
    for place in reversed(range(len(valued))):  # what follows a call comes after it
        key = valued[place].key
        ahead = [valued[after].key for after in following[place]]
        weights = {other: gamma ** (turns[other] - turns[key]) / len(ahead) for other in ahead}
        between = to_go[key] - _weighted(to_go, weights)
        surprise = between + _weighted(values, weights) - values[key]
        advantages[key] = surprise + lam * _weighted(advantages, weights)
    return {call.key: advantages[call.key] for call in valued}


def successors(calls: Sequence[Call]) -> list[list[int]]:
    """S (see the module): for each call the places of those that follow it directly.

    Args:
        calls: in causal order. What is not among them does not lie between.
    """
    placed = [place for place, call in enumerate(calls) if call.sequence_start is not None]
    starts = [calls[place].sequence_start or 0 for place in placed]
    ends = [calls[place].sequence_end or 0 for place in placed]
    result: list[list[int]] = [[] for _ in calls]
    for place, following in zip(placed, interval_successors(starts, ends), strict=True):
        result[place] = placed[following.start : following.stop]
    return result


def interval_successors(starts: Sequence[int], ends: Sequence[int]) -> list[range]:
    """Per interval, those that start after it ended with none wholly between: they stand side by
    side, since they are all that start up to the first end among the later ones. O(n log n).

    `starts` ascend, and no interval ends before it starts.

    Example:
        >>> interval_successors([1, 3, 4, 6, 9], [2, 5, 8, 7, 10])
        [range(1, 3), range(3, 4), range(4, 5), range(4, 5), range(5, 5)]
    """
    first_end = list(accumulate(reversed(ends), min))[::-1]
    result = []
    for start, end in zip(starts, ends, strict=True):
        low = bisect_right(starts, max(start, end))
        high = bisect_right(starts, first_end[low]) if low < len(starts) else low
        result.append(range(low, high))
    return result


def values_by_call(
    rows: Sequence[Row], values: Sequence[Sequence[float]]
) -> dict[str, dict[CallKey, float]]:
    """Rollout → call → value, of what `Learner.values` said of these rows."""
    found: dict[str, dict[CallKey, float]] = defaultdict(dict)
    for row, numbers in zip(rows, values, strict=True):
        found[row.rollout_id].update(zip(row.call_ids, numbers, strict=True))
    return dict(found)


def explained_variance(values: Sequence[float], targets: Sequence[float]) -> float | None:
    """1 - Var(target - value) / Var(target), at most 1 and negative for values that mislead; None
    where targets do not vary. A target of NaN is none: the pair is left out."""
    pairs = [(v, t) for v, t in zip(values, targets, strict=True) if not math.isnan(t)]
    if not pairs or identical([target for _, target in pairs]):
        return None
    errors = [target - value for value, target in pairs]
    return 1.0 - _squares(errors) / _squares([target for _, target in pairs])


def warmup_lambda(lam: float, *, fits: int, warmup: int, explained: float | None) -> float:
    """`lam` where values are fit to be built on, else 1.0, which is right whatever they are.

    Args:
        fits: how often the values were fitted so far.
        warmup: how many fits they need at least.
        explained: the variance that they explained of targets which they had not seen; None: not
            known.
    """
    trusted = fits >= max(warmup, 1) and explained is not None and explained >= TRUSTED_VARIANCE
    return lam if trusted else 1.0


def _weighted(numbers: Mapping[CallKey, float], weights: Mapping[CallKey, float]) -> float:
    return math.fsum(weight * numbers[key] for key, weight in weights.items())


def _squares(numbers: Sequence[float]) -> float:
    """Σ (x - mean)²"""
    mean = math.fsum(numbers) / len(numbers)
    return math.fsum((number - mean) ** 2 for number in numbers)
