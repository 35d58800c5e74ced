"""Transition: one trained call, with the data that a learner needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, repeat

import msgspec

from lightspan.lightning.episode import CallKey, Episode
from lightspan.lightning.selection import CallStatus, Coverage, Rejection
from lightspan.schema.token_records import TokenRecord

TransitionKey = tuple[str, str, int]
"""(attempt id, call id, choice)."""


class Transition(msgspec.Struct, frozen=True, gc=False):
    """One trained call; its token ids are packed in `record` and unpacked at each access."""

    rollout_id: str
    attempt_id: str
    task_id: str
    group_id: str
    agent_path: str
    policy: str
    record: TokenRecord
    turn: int
    """Turn of the call, from 0: its depth in the causal order."""

    @property
    def key(self) -> TransitionKey:
        return self.attempt_id, self.record.call_id, self.record.choice

    @property
    def call_key(self) -> CallKey:
        return self.record.call_id, self.record.choice

    @property
    def versions(self) -> list[int]:
        """Version of the policy's weights that sampled each response token."""
        runs = self.record.versions
        return list(chain.from_iterable(repeat(version, count) for version, count in runs))

    @property
    def tokens(self) -> int:
        """T, the number of response tokens."""
        return len(self.record.response) // 4

    @property
    def length(self) -> int:
        """P + T, the number of prompt and response tokens."""
        return (len(self.record.prompt) + len(self.record.response)) // 4


def trained_transitions(episode: Episode, coverage: Coverage) -> list[Transition]:
    """Return the trained calls of the episode, in causal order."""
    shared = (episode.rollout_id, episode.attempt_id, episode.task_id, episode.group_id)
    return [
        Transition(*shared, call.agent_path, entry.policy, call.record, turn)
        for entry, (call, turn) in zip(coverage.selected, coverage.turns, strict=True)
        if entry.status is CallStatus.TRAINED and call.record is not None
    ]


def reject_calls(
    coverages: Iterable[Coverage], keys: Collection[TransitionKey], reason: Rejection
) -> list[Coverage]:
    """Return copies of coverages in which the trained calls in `keys` are rejected.

    Args:
        coverages: status of the calls of each episode.
        keys: keys of the calls.
        reason: why they are rejected.
    """
    return [
        each.reject({(call, n): reason for attempt, call, n in keys if attempt == each.attempt_id})
        for each in coverages
    ]
