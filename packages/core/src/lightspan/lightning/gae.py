"""Generalised advantage estimation over the causal graph of an episode's calls.

V(c) is the critic's value: the reward-to-go expected at the prompt of call c. With S(c), the calls
that follow c directly, d the difference of their turns, G the reward-to-go of
`lightspan.lightning.credit`, and means over S(c) that are 0 where nothing follows,

    rho(c) = G(c) - mean gamma^d G(j)                                    rewards in between
    A(c) = rho(c) + mean gamma^d V(j) - V(c) + lambda · mean gamma^d A(j)

is generalised advantage estimation (arXiv 1506.02438) with one step per *call*, where verl and most
other programs have one step per token. In a chain it is the usual recursion. With lambda 1 it is
G - V on any graph, which is unbiased whatever V is; below 1 it has less variance and the bias of V.

*Directly*: j starts after c ended, and no call lies wholly between. So a branch that runs in
parallel with others is followed by the call that waits for it, not by the next one by turn (gateway
sequence numbers as intervals):

    plan  [1, 2]                               S: X1, Y
    X1          [3, 5]                         S: X2
    Y             [4,         8]               S: join
    X2                  [6, 7]                 S: join
    join                        [9, 10]        S: nothing

Calls without a value (rejected calls, which the critic does not evaluate) are left out before S is
computed, so the calls before a rejected call are followed by the calls after it: for the policy,
the rejected call was a part of the environment. Its rewards and turn still count, in G and d. A
call without a sequence number has no place in the causal order: it has no predecessor and no
successor, and A = G - V.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import pvariance
from typing import Final

from lightspan.errors import DataError
from lightspan.lightning.advantages import identical
from lightspan.lightning.episode import Call, CallKey
from lightspan.lightning.rows import Row
from lightspan.lightning.turns import Turns

DEFAULT_LAMBDA: Final = 0.95
TRUSTED_VARIANCE: Final = 0.2
"""Minimum explained variance of a critic for lambda below 1. With an untrained critic, training
with lambda 0.5 collapsed in 2 of 2 runs."""


def gae(
    turns: Turns,
    to_go: Mapping[CallKey, float],
    values: Mapping[CallKey, float],
    *,
    gamma: float = 1.0,
    lam: float = DEFAULT_LAMBDA,
) -> dict[CallKey, float]:
    """Return call → advantage before scaling, for each call with a critic's value.

    Subtracting potentials Phi from both `to_go` and `values` does not change the advantages.

    Args:
        turns: the selected calls of an episode, including rejected calls, with their turns.
        to_go: call → reward-to-go, as `Discounted(gamma)` computes it.
        values: call → the critic's value, for the calls that the critic evaluated.
        gamma: the discount per turn in `to_go`.
        lam: lambda, from 0 (least variance, but the bias of `values`) to 1 (unbiased).

    Raises:
        DataError: a value belongs to no call, is not finite, or its call has no `to_go`.
    """
    turn_of = turns.by_key
    for key, value in values.items():
        if key not in turn_of or key not in to_go or not math.isfinite(value):
            raise DataError(
                f"call {key} has the value {value}: values must be finite numbers of selected "
                "calls with a reward-to-go"
            )
    valued = [call for call in turns.calls if call.key in values]
    following = successors(valued)
    advantages: dict[CallKey, float] = {}
    for place in reversed(range(len(valued))):  # successors have a higher place
        key = valued[place].key
        ahead = [valued[after].key for after in following[place]]
        weights = {other: gamma ** (turn_of[other] - turn_of[key]) / len(ahead) for other in ahead}
        surprise = to_go[key] - _weighted(to_go, weights) + _weighted(values, weights) - values[key]
        advantages[key] = surprise + lam * _weighted(advantages, weights)
    return {call.key: advantages[call.key] for call in valued}


def successors(calls: Sequence[Call]) -> list[list[int]]:
    """Return for each call the indices of the calls that follow it directly.

    A call follows directly if it starts after the end of the other, and no third call lies wholly
    between them. Calls without a sequence number follow no call, and none follows them.

    Args:
        calls: calls in causal order. Calls that are left out of this list do not count as lying
            between two calls.
    """
    placed = [place for place, call in enumerate(calls) if call.sequence_start is not None]
    starts = [calls[place].sequence_start or 0 for place in placed]
    ends = [calls[place].sequence_end or 0 for place in placed]
    result: list[list[int]] = [[] for _ in calls]
    for place, following in zip(placed, interval_successors(starts, ends), strict=True):
        result[place] = placed[following.start : following.stop]
    return result


def interval_successors(starts: Sequence[int], ends: Sequence[int]) -> list[range]:
    """Return, per interval, the indices of the intervals that follow it directly, in O(n log n).

    An interval follows another directly if it starts after the end of the other and no third
    interval lies wholly between them. The indices are contiguous, because the intervals that follow
    directly start before any later interval ends.

    Args:
        starts: start of each interval, ascending.
        ends: end of each interval, at or after its start.

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
    """Arrange a critic's values by rollout and call.

    Args:
        rows: rows passed to `Learner.values`.
        values: result of `Learner.values`: per row, one value per call.

    Returns:
        Rollout id → call → the critic's value.
    """
    by_rollout: dict[str, dict[CallKey, float]] = defaultdict(dict)
    for row, numbers in zip(rows, values, strict=True):
        by_rollout[row.rollout_id].update(zip(row.call_ids, numbers, strict=True))
    return dict(by_rollout)


def explained_variance(values: Sequence[float], targets: Sequence[float]) -> float | None:
    """Return the share of the targets' variance that `values` explain; it may be negative.

    It is 1 - Var(target - value) / Var(target). None if the targets do not vary. Pairs whose target
    is NaN are left out.
    """
    pairs = [(v, t) for v, t in zip(values, targets, strict=True) if not math.isnan(t)]
    if not pairs or identical([target for _, target in pairs]):
        return None
    errors = [target - value for value, target in pairs]
    return 1.0 - pvariance(errors) / pvariance([target for _, target in pairs])


def _weighted(numbers: Mapping[CallKey, float], weights: Mapping[CallKey, float]) -> float:
    return math.fsum(weight * numbers[key] for key, weight in weights.items())
