"""lightspan's rollouts and attempts in the original's words, and back.

What a rollout of lightspan has no field for (metadata, a configuration, the mode `test` or none)
travels in its task, in an envelope; see `packed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from lightspan.agl._rollouts import (
    Attempt,
    AttemptStatus,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Worker,
    WorkerStatus,
)
from lightspan.errors import DataError
from lightspan.schema import records as r

ENVELOPE: Final = "lightspan.agl"


class Asked(msgspec.Struct, omit_defaults=True):
    """What was asked of a rollout."""

    input: Any
    mode: RolloutMode | None = None
    config: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    resources_id: str | None = None
    """As it is named here; lightspan's store has an id of its own."""

    @property
    def limits(self) -> RolloutConfig:
        return RolloutConfig.model_validate(self.config)


FINAL: Final = ("succeeded", "failed", "cancelled")
_ROLLOUT: Final[Mapping[r.RolloutStatus, RolloutStatus]] = {
    r.RolloutStatus.SUCCEEDED: "succeeded",
    r.RolloutStatus.FAILED: "failed",
    r.RolloutStatus.LOST: "failed",
    r.RolloutStatus.CANCELLED: "cancelled",
}
_WAITING: Final[Mapping[r.RolloutStatus, tuple[RolloutStatus, ...]]] = {
    r.RolloutStatus.QUEUED: ("queuing", "requeuing"),
    r.RolloutStatus.RUNNING: ("preparing", "running"),
}
_ATTEMPT: Final[Mapping[r.AttemptStatus, AttemptStatus]] = {
    r.AttemptStatus.SUCCEEDED: "succeeded",
    r.AttemptStatus.FAILED: "failed",
    r.AttemptStatus.TIMEOUT: "timeout",
    r.AttemptStatus.LOST: "unresponsive",
    r.AttemptStatus.CANCELLED: "failed",
}
_SAID: Final[Mapping[str, AttemptStatus]] = {
    "failed": "failed",
    "timeout": "timeout",
    "unresponsive": "unresponsive",
}
"""What `_end` says in a report → how the attempt ended."""


def rollout_status(status: r.RolloutStatus, attempt: Attempt | None) -> RolloutStatus:
    if status is r.RolloutStatus.QUEUED:
        return "queuing" if attempt is None else "requeuing"
    if status is r.RolloutStatus.RUNNING:
        return "running" if attempt is not None and attempt.status == "running" else "preparing"
    return _ROLLOUT[status]


def may_be(status: r.RolloutStatus, wanted: Sequence[RolloutStatus]) -> bool:
    """Whether a rollout of lightspan in this status may be in one of those of the original."""
    words = _WAITING.get(status) or (_ROLLOUT[status],)
    return any(word in wanted for word in words)


def attempt_status(attempt: r.Attempt, *, has_spans: bool) -> AttemptStatus:
    if attempt.status is r.AttemptStatus.RUNNING:
        return "running" if has_spans else "preparing"
    return _SAID.get(attempt.message, _ATTEMPT[attempt.status])


def lost_report(attempt: r.Attempt, status: str, *, counts: bool = True) -> r.Report:
    """The report after which the rollout is queued again, while tries are left."""
    lost, why = r.AttemptStatus.LOST, r.Outcome.INFRASTRUCTURE
    return attempt.report(lost, why, status, counts=counts)


def worker_of(name: str, attempt: r.Attempt | None, said: Mapping[str, Any]) -> Worker:
    if attempt is None:
        status: WorkerStatus = "idle" if "last_dequeue_time" in said else "unknown"
        return Worker(worker_id=name, status=status, **said)
    busy = not attempt.sealed
    ended = attempt_status(attempt, has_spans=True) in ("timeout", "unresponsive")
    return Worker(
        worker_id=name,
        status="busy" if busy else "unknown" if ended else "idle",
        last_busy_time=attempt.started_at,
        last_idle_time=attempt.ended_at,
        current_rollout_id=attempt.rollout_id if busy else None,
        current_attempt_id=attempt.attempt_id if busy else None,
        **said,
    )


def packed(asked: Asked) -> r.Json:
    """The task of a rollout: its input, in an envelope where there is more to say.

    Raises:
        DataError: JSON cannot say the input.
    """
    more = asked.config or asked.metadata or asked.resources_id or asked.mode in (None, "test")
    try:
        built = msgspec.to_builtins(asked if more else asked.input)
    except TypeError as error:
        raise DataError(f"the input of a rollout must be JSON: {error}") from error
    return {ENVELOPE: built} if more else built


def asked_of(rollout: r.Rollout) -> Asked:
    """The inverse of `packed`."""
    task = rollout.task
    if isinstance(task, dict) and task.keys() == {ENVELOPE}:
        return msgspec.convert(task[ENVELOPE], Asked)
    return Asked(task, "train" if rollout.mode is r.Mode.TRAIN else "val")
