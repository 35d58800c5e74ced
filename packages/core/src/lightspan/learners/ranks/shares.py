"""Which rank computes which rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from lightspan.learners.inputs import ordered
from lightspan.lightning.rows import Row


def shares(rows: Sequence[Row], ranks: int, *, whole_rollouts: bool) -> list[list[int]]:
    """For each rank, the indices of its rows; a rank may have none.

    Rows that begin alike are neighbours, and each rank has a stretch of them: what they share is
    computed once, as on one device. The stretches are alike in new tokens, to within a rollout. All
    of it follows from the rows alone, not from how they were handed in.

    Each policy's rows are shared out by themselves: ranks wait for each other at each policy's
    step, and what becomes of one policy does not depend on another.

    Args:
        whole_rollouts: a policy's rows of a rollout stay together.
    """
    by_policy: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_policy.setdefault(row.policy, []).append(index)
    found: list[list[int]] = [[] for _ in range(ranks)]
    for indices in by_policy.values():
        units = _units(rows, indices, whole_rollouts=whole_rollouts)
        for unit, rank in zip(units, _places(_sizes(rows, units), ranks), strict=True):
            found[rank] += unit
    return [sorted(indices) for indices in found]


def _units(rows: Sequence[Row], indices: Sequence[int], *, whole_rollouts: bool) -> list[list[int]]:
    """What is not torn, in an order in which what begins alike is together."""
    order = ordered(rows, indices)
    if not whole_rollouts:
        return [[index] for index in order]
    units: dict[str, list[int]] = {}
    for index in order:
        units.setdefault(rows[index].rollout_id, []).append(index)
    return list(units.values())


def _sizes(rows: Sequence[Row], units: Sequence[Sequence[int]]) -> list[int]:
    """Of each, the tokens that it does not share with what is before it."""
    sizes = []
    before: list[int] = []
    for unit in units:
        size = 0
        for index in unit:
            ids = rows[index].ids
            size += max(1, len(ids) - _common(before, ids))
            before = ids
        sizes.append(size)
    return sizes


def _places(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each: that in whose part of the whole its middle lies, so that no rank gets all
    that is left over."""
    bounds = [sum(sizes) * rank / ranks for rank in range(1, ranks)]
    ends = accumulate(sizes)
    return [bisect_left(bounds, end - size / 2) for end, size in zip(ends, sizes, strict=True)]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens they begin with alike."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
