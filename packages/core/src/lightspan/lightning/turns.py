"""Turns: the depth of each selected call in the causal order of an episode.

The turn of a call is the length of the longest chain of selected calls before it. In a chain, each
call ended before the next call began. So calls that overlap do not follow each other, and calls
made in parallel share a turn. With the gateway's sequence numbers as intervals:

    write   [1, 2]                      turn 0
    search  [3, 6]                      turn 1   in parallel with the next two
    search        [4, 5]                turn 1
    refine                [7, 8]        turn 2   the longest chain before it has two calls

Rejected calls of selected agents count too, because they happened. So do calls that were replayed
from another attempt, but the turns list only the calls after them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

from lightspan.lightning.episode import Call, CallKey
from lightspan.schema.token_records import CallOutcome


class Turns:
    """The selected calls of an episode (of agents to train), each with its turn.

    Args:
        calls: calls in causal order, with replayed calls.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._all = list(zip(calls, _depths(calls), strict=True))
        listed = [pair for pair in self._all if pair[0].outcome is not CallOutcome.REPLAYED]
        self.calls = [call for call, _ in listed]
        self.depths = [turn for _, turn in listed]
        """[calls] Turn of each call, 0 first, unless replayed calls come before."""
        self.count = max(self.depths, default=-1) + 1
        """Number of turns."""

    def __iter__(self) -> Iterator[tuple[Call, int]]:
        return zip(self.calls, self.depths, strict=True)

    @cached_property
    def by_key(self) -> dict[CallKey, int]:
        """Call key → turn."""
        return {call.key: turn for call, turn in self}

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """Two lists with one entry per ended call, in the order of the calls' ends.

        An entry of the first list is the sequence number at which the call ended. The entry of the
        second list is the highest turn of the calls that had ended by then.
        """
        ends = sorted((c.sequence_end, turn) for c, turn in self._all if c.sequence_end is not None)
        return [end for end, _ in ends], list(accumulate((turn for _, turn in ends), max))

    def ended_before(self, position: int) -> int | None:
        """Return the last turn with a call that ended before the sequence number `position`.

        None if no call ended before it.
        """
        ends, turns = self._ends
        count = bisect_left(ends, position)
        return turns[count - 1] if count else None


def _depths(calls: Sequence[Call]) -> list[int]:
    """Return the turn of each call: the length of the longest chain of calls before it.

    A call without a sequence number has no place in the causal order: it gets the turn of the call
    before it in `calls`, and is part of no chain.
    """
    ordered = [call for call in calls if call.sequence_start is not None]
    depths = interval_depths(
        [call.sequence_start or 0 for call in ordered], [call.sequence_end or 0 for call in ordered]
    )
    if len(ordered) == len(calls):
        return depths
    result, place = [], 0
    for call in calls:
        place += call.sequence_start is not None
        result.append(depths[place - 1] if place else 0)
    return result


def interval_depths(starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return, per interval, the length of the longest chain of intervals before it.

    In a chain, each interval ends before the next starts.

    Args:
        starts: start of each interval, ascending.
        ends: end of each interval, at or after its start.

    Example:
        >>> interval_depths([1, 3, 4, 7], [2, 6, 5, 8])
        [0, 1, 1, 2]
    """
    by_end = sorted(range(len(ends)), key=ends.__getitem__)
    depths: list[int] = []
    closed, depth = 0, 0
    for start in starts:
        while ends[by_end[closed]] < start:
            depth = max(depth, depths[by_end[closed]] + 1)
            closed += 1
        depths.append(depth)
    return depths
