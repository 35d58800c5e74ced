"""Convert rollouts, attempts, spans and token records to rows of the SQL tables, and back.

The order of the values is that of the columns in `queries.sql`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Fork,
    Mode,
    Outcome,
    RolloutState,
    RolloutStatus,
    RolloutSummary,
)
from lightspan.schema.reward import Reward
from lightspan.stores._encoding import PackedCall, PackedRollout, PackedSpan, unpack_rollout
from lightspan.stores._state_machine import Progress

_msgpack = msgspec.msgpack.Encoder()
_reward_decoder = msgspec.msgpack.Decoder(Reward)
_text_list_decoder = msgspec.msgpack.Decoder(list[str])

QUEUED: Final = 1
"""`rollouts.queued` of a queued rollout; 0 if it is not queued."""
ALONE: Final = 2
"""`rollouts.queued` of a queued rollout that must run alone in its process."""

_new_rollout_values = attrgetter("created_at", "change", "infrastructure_tries", "attempts")
_progress_values = attrgetter(
    "change", "infrastructure_tries", "attempts", "attempt_id", "finished_at", "rollout_id"
)
_new_attempt_values = attrgetter(
    "attempt_id", "rollout_id", "number", "epoch", "runner_id", "call_token", "started_at"
)


class AttemptKey(NamedTuple):
    """What must be known of an attempt to write its spans and calls.

    The position is the number by which rows refer to the attempt. A write is late if the attempt
    has ended (`sealed`) or has another epoch than the write.
    """

    position: int
    epoch: int
    sealed: bool

    def is_late(self, epoch: int) -> bool:
        return self.sealed or self.epoch != epoch


def span_row(attempt: AttemptKey, span: PackedSpan) -> tuple[int, str, str, bool, bytes]:
    late = span.late or attempt.is_late(span.epoch)
    return attempt.position, span.span_id, span.call_id, late, span.body


def record_rows(attempt: AttemptKey, call: PackedCall) -> list[tuple[Any, ...]]:
    late = attempt.is_late(call.span.epoch)
    return [(attempt.position, *each._replace(late=late or each.late)) for each in call.records]


def rollout_row(position: int, new: PackedRollout, progress: Progress) -> tuple[Any, ...]:
    rollout = new.rollout
    ids = (position, rollout.rollout_id, rollout.run_id)
    queued = QUEUED * (progress.status is RolloutStatus.QUEUED)
    settings = (str(rollout.mode), rollout.step, progress.max_infrastructure_tries)
    return (*ids, queued, *settings, str(progress.status), *_new_rollout_values(progress))


def progress_row(progress: Progress) -> tuple[Any, ...]:
    return (str(progress.status), *_progress_values(progress))


def queue_row(progress: Progress) -> tuple[Any, ...]:
    queued = ALONE if progress.alone else QUEUED
    return (queued * (progress.status is RolloutStatus.QUEUED), *progress_row(progress))


def read_progress(row: Sequence[Any]) -> Progress:
    rollout_id, max_tries, status, *rest, queued = row
    values = (rollout_id, max_tries, RolloutStatus(status), *rest, queued == ALONE)
    return Progress(*values)


def read_state(row: Sequence[Any]) -> RolloutState:
    body, status, *rest = row
    values = (unpack_rollout(body), RolloutStatus(status), *rest)
    return RolloutState(**dict(zip(RolloutState.__struct_fields__, values, strict=True)))


def read_summary(row: Sequence[Any], read_text: Callable[[Any], str]) -> RolloutSummary:
    fields = dict(zip(_summary_columns, row, strict=True))
    ids = _ids_decoder.decode(fields.pop("body"))
    reward, feedback, errors = fields["reward"], fields["feedback"], fields["capture_errors"]
    fields["group_id"], fields["task_id"] = ids.group_id, ids.task_id
    fields["fork"] = ids.fork
    fields["mode"] = _modes[fields["mode"]]
    fields["status"] = _statuses[fields["status"]]
    fields["runner_id"] = fields["runner_id"] or ""
    fields["outcome"] = _outcomes.get(fields["outcome"])
    fields["message"] = read_text(fields["message"]) if fields["message"] else ""
    fields["reward"] = None if reward is None else _reward_decoder.decode(reward)
    fields["feedback"] = None if feedback is None else msgspec.json.decode(feedback, type=Reward)
    fields["capture_errors"] = len(_text_list_decoder.decode(errors)) if errors else 0
    return RolloutSummary(**fields)


class _Ids(msgspec.Struct):
    """The fields of a rollout's body that a summary needs; the task is skipped."""

    task_id: str
    group_id: str
    fork: Fork | None = None


_ids_decoder = msgspec.msgpack.Decoder(_Ids)
_summary_columns: Final = (
    *("body", "rollout_id", "run_id", "mode", "step", "status", "created_at", "position", "change"),
    *("attempt_id", "runner_id", "outcome", "message", "reward", "feedback", "started_at"),
    *("ended_at", "capture_errors"),
)
# A look-up in these costs a tenth of a call of the enum, which counts for 100,000 rows.
_modes: Final = {str(each): each for each in Mode}
_statuses: Final = {str(each): each for each in RolloutStatus}
_outcomes: Final = {str(each): each for each in Outcome}


def attempt_row(attempt: Attempt, pack_text: Callable[[str], Any]) -> tuple[Any, ...]:
    """Return the values of the query `insert_attempts`.

    Args:
        pack_text: converts a text, of any characters, to a value that the database takes.
    """
    ids = (attempt.rollout_id, attempt.number, attempt.rollout_id)
    return (*_new_attempt_values(attempt), *attempt_changes(attempt, pack_text), *ids)


def attempt_changes(attempt: Attempt, pack_text: Callable[[str], Any]) -> tuple[Any, ...]:
    """Return the values of the columns that may change after an attempt's insertion."""
    return (
        str(attempt.status),
        attempt.lease_until,
        attempt.ended_at,
        None if attempt.reward is None else _msgpack.encode(attempt.reward),
        None if attempt.outcome is None else str(attempt.outcome),
        pack_text(attempt.message),
        _msgpack.encode(attempt.capture_errors),
    )


def read_attempt(row: Sequence[Any], read_text: Callable[[Any], str]) -> Attempt:
    fields = dict(zip(Attempt.__struct_fields__, row, strict=True))
    reward, outcome = fields["reward"], fields["outcome"]
    fields["status"] = AttemptStatus(fields["status"])
    fields["reward"] = None if reward is None else _reward_decoder.decode(reward)
    fields["outcome"] = None if outcome is None else Outcome(outcome)
    fields["message"] = read_text(fields["message"])
    fields["capture_errors"] = _text_list_decoder.decode(fields["capture_errors"])
    return Attempt(**fields)
