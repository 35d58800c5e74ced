"""Transition: one trained call, with what a learner needs of it; and the turns of an episode.

The *turn* of a call is its depth in the causal order of the selected calls: the length of the
longest chain of selected calls, each ended before the next began, that ended before it began. Calls
that overlap therefore do not follow each other, and calls made side by side share a turn. With the
gateway's sequence numbers as intervals:

    write   [1, 2]                      turn 0
    search  [3, 6]                      turn 1   in parallel with the next two
    search        [4, 5]                turn 1
    refine                [7, 8]        turn 2   the longest chain before it has two calls

Calls of selected agents that were rejected count too: they happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

import msgspec

from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.lightning.selection import CallStatus, Coverage
from lightspan.schema.routing import agent_name
from lightspan.schema.token_records import FinishReason, TokenRecord

TransitionKey = tuple[str, str, int]
"""(attempt id, call id, choice)."""


class Transition(msgspec.Struct, frozen=True, gc=False):
    """One call of a selected agent. Tokens stay in the record, packed, until they are asked for."""

    rollout_id: str
    attempt_id: str
    task_id: str
    group_id: str
    agent_path: str
    policy: str
    record: TokenRecord
    turn: int
    """See the module; 0 for the first."""
    reward: float | None = None
    """Its credit, once a credit rule has spoken."""

    @property
    def key(self) -> TransitionKey:
        return self.attempt_id, self.record.call_id, self.record.choice

    @property
    def call_key(self) -> CallKey:
        return self.record.call_id, self.record.choice

    @property
    def call_id(self) -> str:
        return self.record.call_id

    @property
    def choice(self) -> int:
        return self.record.choice

    @property
    def agent(self) -> str:
        """The innermost name of the path."""
        return agent_name(self.agent_path)

    @property
    def prompt_ids(self) -> list[int]:
        """[P] token ids, exactly as the engine consumed them."""
        return self.record.prompt_ids

    @property
    def response_ids(self) -> list[int]:
        """[T] token ids, exactly as the engine sampled them."""
        return self.record.response_ids

    @property
    def logprobs(self) -> list[float]:
        """[T] log-probabilities of the distribution sampled from."""
        return self.record.logprobs

    @property
    def versions(self) -> list[int]:
        """[T] policy version that sampled each response token."""
        runs = self.record.versions
        return list(chain.from_iterable(repeat(version, count) for version, count in runs))

    @property
    def temperature(self) -> float:
        return self.record.sampling.temperature

    @property
    def finish_reason(self) -> FinishReason:
        return self.record.finish_reason

    @property
    def tokens(self) -> int:
        """T, the number of response tokens."""
        return len(self.record.response) // 4

    @property
    def length(self) -> int:
        """P + T."""
        return (len(self.record.prompt) + len(self.record.response)) // 4


def trained_transitions(episode: Episode, coverage: Coverage) -> list[Transition]:
    """The trained calls of the episode, in causal order."""
    shared = (episode.rollout_id, episode.attempt_id, episode.task_id, episode.group_id)
    entries = coverage.selected
    calls = [entry.call for entry in entries]
    trained = CallStatus.TRAINED
    return [
        Transition(*shared, call.agent_path, entry.policy, call.record, turn)
        for entry, call, turn in zip(entries, calls, turn_depths(calls), strict=True)
        if entry.verdict is trained and call.record is not None
    ]


def turn_depths(calls: Sequence[Call]) -> list[int]:
    """The turn of each call (see the module) among these, which are in causal order.

    A call without sequence has no place in the causal order: it gets the turn of the call before
    it, and no call follows from it. Linear, but for a sort of numbers that are almost in order.
    """
    ordered = [call for call in calls if call.sequence_start is not None]
    starts = [call.sequence_start or 0 for call in ordered]
    ends = [call.sequence_end or 0 for call in ordered]
    depths = interval_depths(starts, ends)
    if len(ordered) == len(calls):
        return depths
    result, place = [], 0
    for call in calls:
        place += call.sequence_start is not None
        result.append(depths[place - 1] if place else 0)
    return result


def interval_depths(starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Per interval, the longest chain of intervals that each end before the next starts and all end
    before it starts. `starts` ascend, and no interval ends before it starts.

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
