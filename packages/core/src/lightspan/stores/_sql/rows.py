"""Rollouts, attempts, spans and token records as rows of tables, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.schema.records import Attempt, AttemptStatus, Outcome, RolloutState, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.stores._encoding import PackedCall, PackedRollout, PackedSpan, unpack_rollout
from lightspan.stores._state_machine import Progress

_msgpack = msgspec.msgpack.Encoder()
_reward_decoder = msgspec.msgpack.Decoder(Reward)
_text_list_decoder = msgspec.msgpack.Decoder(list[str])

QUEUED: Final = 1
"""What `rollouts.queued` is of a rollout that is queued."""
ALONE: Final = 2
"""What it is of one that is to be run alone."""


class Writing(NamedTuple):
    """What decides whether a write to an attempt is late."""

    position: int
    epoch: int
    sealed: bool

    def late(self, epoch: int) -> bool:
        return self.sealed or self.epoch != epoch


def span_row(attempt: Writing, span: PackedSpan) -> tuple[int, str, str, bool, bytes]:
    late = span.late or attempt.late(span.epoch)
    return attempt.position, span.span_id, span.call_id, late, span.body


def record_rows(attempt: Writing, call: PackedCall) -> list[tuple[Any, ...]]:
    late = attempt.late(call.span.epoch)
    return [
        (
            attempt.position,
            record.call_id,
            record.choice,
            record.sequence_start,
            late or record.late,
            record.head,
            record.prompt,
            record.response,
            record.logprobs,
        )
        for record in call.records
    ]


def rollout_row(position: int, new: PackedRollout, progress: Progress) -> tuple[Any, ...]:
    rollout = new.rollout
    return (
        position,
        rollout.rollout_id,
        rollout.run_id,
        QUEUED * (progress.status is RolloutStatus.QUEUED),
        str(rollout.mode),
        rollout.step,
        progress.max_infrastructure_tries,
        str(progress.status),
        progress.created_at,
        progress.change,
        progress.infrastructure_tries,
        progress.attempts,
    )


def progress_row(progress: Progress) -> tuple[Any, ...]:
    return (
        str(progress.status),
        progress.change,
        progress.infrastructure_tries,
        progress.attempts,
        progress.attempt_id,
        progress.finished_at,
        progress.rollout_id,
    )


def queue_row(progress: Progress) -> tuple[Any, ...]:
    queued = ALONE if progress.alone else QUEUED
    return (queued * (progress.status is RolloutStatus.QUEUED), *progress_row(progress))


def read_progress(row: Sequence[Any]) -> Progress:
    (
        rollout_id,
        limit,
        status,
        created_at,
        change,
        tries,
        attempts,
        attempt_id,
        finished_at,
        queued,
    ) = row
    return Progress(
        rollout_id=rollout_id,
        max_infrastructure_tries=limit,
        status=RolloutStatus(status),
        created_at=created_at,
        change=change,
        infrastructure_tries=tries,
        attempts=attempts,
        attempt_id=attempt_id,
        finished_at=finished_at,
        alone=queued == ALONE,
    )


def read_state(row: Sequence[Any]) -> RolloutState:
    body, status, tries, attempt_id, created_at, finished_at, change = row
    return RolloutState(
        rollout=unpack_rollout(body),
        status=RolloutStatus(status),
        infrastructure_tries=tries,
        attempt_id=attempt_id,
        created_at=created_at,
        finished_at=finished_at,
        change=change,
    )


def attempt_row(attempt: Attempt, message: Callable[[str], Any]) -> tuple[Any, ...]:
    """What `insert_attempts` takes; how a message is kept is the store's affair."""
    return (
        attempt.attempt_id,
        attempt.rollout_id,
        attempt.number,
        attempt.epoch,
        attempt.runner_id,
        attempt.call_token,
        attempt.started_at,
        *moving(attempt, message),
        attempt.rollout_id,
        attempt.number,
        attempt.rollout_id,
    )


def moving(attempt: Attempt, message: Callable[[str], Any]) -> tuple[Any, ...]:
    """What may change of an attempt."""
    return (
        str(attempt.status),
        attempt.lease_until,
        attempt.ended_at,
        None if attempt.reward is None else _msgpack.encode(attempt.reward),
        None if attempt.outcome is None else str(attempt.outcome),
        message(attempt.message),
        _msgpack.encode(attempt.capture_errors),
    )


def read_attempt(row: Sequence[Any], message: Callable[[Any], str]) -> Attempt:
    return Attempt(
        attempt_id=row[0],
        rollout_id=row[1],
        number=row[2],
        epoch=row[3],
        status=AttemptStatus(row[4]),
        runner_id=row[5],
        call_token=row[6],
        lease_until=row[7],
        started_at=row[8],
        ended_at=row[9],
        reward=None if row[10] is None else _reward_decoder.decode(row[10]),
        outcome=None if row[11] is None else Outcome(row[11]),
        message=message(row[12]),
        capture_errors=_text_list_decoder.decode(row[13]),
    )
