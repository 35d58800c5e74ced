"""Tasks, rollouts and attempts as a store holds them, and their state machine.

The table lists the legal moves of a rollout (R) and of its attempts (A). Any other move raises
`IllegalMoveError`; repeating a move is a no-op. A lost attempt uses up one of the rollout's
infrastructure tries, unless `Report.counts` is False.

=========  ==========  =======================================================================
from       to          when
=========  ==========  =======================================================================
R queued   running     a runner claimed it: a new attempt is `running`
R queued   cancelled   the algorithm cancelled it
R running  succeeded   its attempt reported `succeeded`
R running  failed      its attempt reported `failed` or `timeout` (an outcome of the app)
R running  queued      its attempt was `lost` and infrastructure tries are left
R running  lost        its attempt was `lost` and no infrastructure try is left
R running  cancelled   the algorithm cancelled it; its attempt becomes `cancelled`
A running  succeeded   the app returned
A running  failed      the app raised or overflowed the context
A running  timeout     the app ran longer than the rollout allows
A running  lost        the runner died, lost its lease or could not reach the store or gateway
A running  cancelled   the rollout was cancelled
=========  ==========  =======================================================================

`succeeded`, `failed`, `lost`, `cancelled` (rollout) and every attempt status but `running` are
final. Spans and calls that arrive after an attempt's end are stored with the mark `late` and never
trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

import msgspec

from lightspan.errors import DataError, IllegalMoveError
from lightspan.schema import clock
from lightspan.schema.ids import random_digits
from lightspan.schema.reward import Reward

Json = Any
"""A JSON value."""


class Mode(StrEnum):
    """The purpose of a rollout.

    Trained agents sample with the algorithm's parameters in `train` and `dev`. In `val` they sample
    with the app's own, unless the trainer sets a temperature for validation.
    """

    TRAIN = "train"
    VAL = "val"
    DEV = "dev"
    PRODUCTION = "production"
    """The app ran without a runner and was recorded (`lightspan.record`). No runner can claim the
    rollout, and no policy gradient is computed from it."""


class RolloutStatus(StrEnum):
    """The status of a rollout; the module's docstring lists the legal moves."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self not in (RolloutStatus.QUEUED, RolloutStatus.RUNNING)


class AttemptStatus(StrEnum):
    """The status of an attempt; the module's docstring lists the legal moves."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMEOUT = "timeout"
    LOST = "lost"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self is not AttemptStatus.RUNNING


_ROLLOUT_MOVES: Final = {
    RolloutStatus.QUEUED: {RolloutStatus.RUNNING, RolloutStatus.CANCELLED},
    RolloutStatus.RUNNING: {*RolloutStatus} - {RolloutStatus.RUNNING},
}
"""Status of a rollout → statuses to which it may go; a final status is missing."""


def check_rollout_move(before: RolloutStatus, after: RolloutStatus) -> None:
    """Raise `IllegalMoveError` unless a rollout may go from `before` to `after`."""
    if after not in _ROLLOUT_MOVES.get(before, ()):
        raise IllegalMoveError(f"a rollout cannot go from {before} to {after}")


def check_attempt_move(before: AttemptStatus, after: AttemptStatus) -> None:
    """Raise `IllegalMoveError` unless an attempt may go from `before` to `after`."""
    if before.final or not after.final:
        raise IllegalMoveError(f"an attempt cannot go from {before} to {after}")


def rollout_status_after(
    attempt: AttemptStatus, infrastructure_tries: int, max_infrastructure_tries: int
) -> RolloutStatus:
    """Return the status of a rollout after the end of its attempt.

    Args:
        attempt: the final status of the attempt.
        infrastructure_tries: number of tries used up by lost attempts, including this attempt.
        max_infrastructure_tries: the rollout's maximum of `infrastructure_tries`.

    Raises:
        IllegalMoveError: `attempt` is not a final status.
    """
    match attempt:
        case AttemptStatus.SUCCEEDED:
            return RolloutStatus.SUCCEEDED
        case AttemptStatus.FAILED | AttemptStatus.TIMEOUT:
            return RolloutStatus.FAILED
        case AttemptStatus.CANCELLED:
            return RolloutStatus.CANCELLED
        case AttemptStatus.LOST:
            has_tries_left = infrastructure_tries < max_infrastructure_tries
            return RolloutStatus.QUEUED if has_tries_left else RolloutStatus.LOST
        case _:
            raise IllegalMoveError(f"attempt status {attempt} does not end an attempt")


_json_encoder: Final = msgspec.json.Encoder(order="deterministic")


def task_id(task: Json) -> str:
    """Return the `id` in a task; for a task without one, a hash of its content."""
    if isinstance(task, dict) and isinstance(task.get("id"), str | int):
        return str(task["id"])
    return fingerprint(task)


def fingerprint(value: Json) -> str:
    """Return a short hash of a JSON value that does not depend on the order of keys."""
    return hashlib.sha256(_json_encoder.encode(value)).hexdigest()[:16]


def check_keys(task: object, where: str) -> None:
    """Raise `DataError` if a key in a task is no text; JSON would silently make text of it.

    Args:
        task: a task without cycles.
        where: name of the task, for the message.
    """
    parts = [(where, task)]
    for place, value in parts:
        if isinstance(value, dict | list | tuple):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            parts += [(f"{place}[{key!r}]", part) for key, part in pairs]
        for key in value if isinstance(value, dict) else ():
            if not isinstance(key, str):
                raise DataError(f"{place} has the key {key!r}; keys are text: write {str(key)!r}")


def task_json(value: object, dump: Callable[[Any], Any] | None = None) -> str:
    """Return a value as the JSON of a task.

    Dataclasses, enums, dates, decimals and UUIDs become what `msgspec.json` writes for them.

    Args:
        value: the value.
        dump: returns other objects as JSON values, or raises; None if every other object is
            refused.

    Raises:
        Exception: `dump` raised it; or a part is not JSON, such as bytes, infinity, an integer of
            more than 64 bits, half of a surrogate pair, or a cycle.
    """
    plain = msgspec.to_builtins(value, str_keys=True, builtin_types=BINARY, enc_hook=dump)
    msgspec.msgpack.encode(plain)  # stores hold it as MessagePack
    return json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


BINARY: Final = (bytes, bytearray, memoryview)
"""Types that msgspec would silently write as base64."""


def new_id(prefix: str) -> str:
    """Return a new id such as `call-18…`: the prefix, the time and 64 random bits.

    The caller of a store makes the ids, so that it can repeat a write with the same id. Ids of
    about the same time are adjacent in a store's indexes.
    """
    return f"{prefix}-{clock.now_ns():016x}{random_digits()}"


class Fork(msgspec.Struct, frozen=True):
    """The recorded attempt that a rollout repeats, and the call from which on it samples anew.

    The gateway answers the calls before that call as it answered them in the recorded attempt.
    """

    attempt_id: str
    """Id of the recorded attempt."""
    call_id: str = ""
    """Id of the first call that is sampled anew; empty to repeat the whole attempt."""
    rollout_id: str = ""
    """Id of the recorded attempt's rollout, to which tools link."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the app on a task, as the algorithm enqueues it. It never changes."""

    rollout_id: str
    task: Json
    """The app's input."""
    task_id: str
    """Id that is equal for equal tasks, such as those of a group's rollouts."""
    run_id: str = ""
    """Id of the training run that enqueued the rollout. For an app recorded by `lightspan.record`,
    the name of the service."""
    group_id: str = ""
    """Id of the group of rollouts whose rewards are compared; empty outside training."""
    mode: Mode = Mode.TRAIN
    resources_id: str = ""
    step: int = 0
    """Number of the training iteration or evaluation for which the rollout was enqueued."""
    timeout_s: float | None = None
    max_infrastructure_tries: int = 3
    app: str = ""
    """`module:name` of the app that must run the rollout; empty for any app."""
    fork: Fork | None = None
    """The attempt that the rollout repeats up to a call; None if it repeats none."""


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with its status."""

    rollout: Rollout
    status: RolloutStatus
    infrastructure_tries: int = 0
    """Number of tries used up by lost attempts."""
    attempt_id: str | None = None
    """Id of the latest attempt; None before the first."""
    created_at: float = 0.0
    """Seconds since the epoch by the store's clock."""
    finished_at: float | None = None
    change: int = 0
    """The cursor value of the latest status change (`Store.watch`)."""


class Outcome(StrEnum):
    """The reason for which an attempt ended."""

    OK = "ok"
    APP_ERROR = "app_error"
    TIMEOUT = "timeout"
    CONTEXT_OVERFLOW = "context_overflow"
    BAD_REWARD = "bad_reward"
    """The app returned a value that is not a reward."""
    INFRASTRUCTURE = "infrastructure"
    CANCELLED = "cancelled"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a rollout."""

    attempt_id: str
    rollout_id: str
    number: int
    """Number of the attempt among those of its rollout, from 1 on."""
    epoch: int
    """Fencing token of the runner's writes. Each claim of the rollout increases it, and writes with
    another epoch are late."""
    status: AttemptStatus = AttemptStatus.RUNNING
    runner_id: str = ""
    call_token: str = ""
    """Secret that authorises this attempt's model calls at the gateway, and nothing else."""
    lease_until: float = 0.0
    """End of the lease, in seconds since the epoch by the store's clock."""
    started_at: float = 0.0
    ended_at: float | None = None
    reward: Reward | None = None
    outcome: Outcome | None = None
    message: str = ""
    """Description of the failure, for people."""
    capture_errors: list[str] = msgspec.field(default_factory=list)
    """Errors in recording the attempt. An attempt with a capture error is never trained."""

    @property
    def sealed(self) -> bool:
        """Whether the attempt has ended. Spans and calls written later get the mark `late`."""
        return self.status.final

    def report(
        self, status: AttemptStatus, outcome: Outcome, message: str = "", **fields: Any
    ) -> Report:
        """Return a report with the id and the epoch of this attempt.

        Args:
            fields: further fields of `Report`.
        """
        return Report(
            attempt_id=self.attempt_id,
            epoch=self.epoch,
            status=status,
            outcome=outcome,
            message=message,
            **fields,
        )


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A rollout with its latest attempt, for tables: without the task and without any secret.

    The fields from `attempt_id` on are those of the latest attempt. Before the first attempt they
    have their defaults.
    """

    rollout_id: str
    run_id: str
    group_id: str
    task_id: str
    mode: Mode
    step: int
    status: RolloutStatus
    created_at: float
    position: int
    """Number that grows in the order in which rollouts were enqueued."""
    change: int
    """The cursor value of the latest change (`Store.watch`)."""
    attempt_id: str | None = None
    runner_id: str = ""
    outcome: Outcome | None = None
    message: str = ""
    reward: Reward | None = None
    """The reward that the attempt's report gave; None before its end and if there is none."""
    fork: Fork | None = None
    """The attempt that the rollout repeats up to a call; None if it repeats none."""
    feedback: Reward | None = None
    """The feedback on the attempt, or else the last feedback on one of its calls; None if there is
    none."""
    started_at: float | None = None
    ended_at: float | None = None
    capture_errors: int = 0
    """Number of errors in recording the attempt."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with one of its attempts, such as a runner gets from `Store.claim`."""

    rollout: Rollout
    attempt: Attempt
    alone: bool = False
    """Whether the attempt must run alone in its process, because an earlier one may have crashed
    its process."""


class AttemptRef(msgspec.Struct, frozen=True, order=True):
    """Id and epoch of an attempt.

    The epoch is a number that increases each time the rollout is claimed. A runner whose epoch is
    older than the attempt's has lost the attempt, so its writes are stored with the mark `late`.
    """

    attempt_id: str
    epoch: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt, as its runner reports it.

    Spans and calls that are written after it are stored with the mark `late`.
    """

    attempt_id: str
    epoch: int
    status: AttemptStatus
    outcome: Outcome = Outcome.OK
    reward: Reward | None = None
    message: str = ""
    capture_errors: list[str] = msgspec.field(default_factory=list)
    counts: bool = True
    """Whether a lost attempt uses up an infrastructure try. False if the process crashed because of
    another attempt."""
    alone: bool = False
    """Whether the rollout's next attempt must run alone in its process (`Claim.alone`)."""


class PeerRole(StrEnum):
    """The purpose for which a process uses a store: to train agents or to run attempts."""

    TRAINER = "trainer"
    RUNNER = "runner"


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer or runner that uses a store, as it announces itself with `Store.announce`.

    It does so every few seconds. Processes with other versions of lightspan read the announcement:
    a new field needs a default, and no field may be removed.
    """

    peer_id: str
    role: PeerRole
    app: str
    """`module:name` of the app that a trainer trains or a runner runs."""
    protocol: int
    """`semconv.PROTOCOL_VERSION` of the peer's lightspan."""
    lightspan: str
    """Version of the peer's lightspan."""
    python: str = ""
    """Path of the peer's Python interpreter."""
    run_id: str = ""
    """Id of a trainer's run, or of the only run for which a runner works; empty for any run."""
    place: str = ""
    """Machine and folder of a trainer, which locks the folder; empty for a runner."""
    slots: int = 0
    """Maximum number of concurrent attempts of a runner."""
    complete: bool = False
    """Whether a trainer's run has nothing left to do."""
    gateway: str = ""
    """Base URL of a trainer's gateway; empty for a runner, and if no call goes through it."""
    remote: bool = False
    """Whether a trainer's runners may be on other machines. Then the store's server, if it has one,
    must reach the gateway."""
    runs: list[str] | None = None
    """Ids of the runs for which a runner works; None if it does not tell."""
    problem: str = ""
    """Why a runner works for none of its app's trainings; empty if it does."""
    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """Module → hash of its source, for the modules of the app; empty if unknown."""
    clock: float = 0.0
    """Time of the last announcement by the peer's own clock, in seconds since the epoch; 0 if
    unknown."""
    silent_s: float = 0.0
    """Seconds since the peer's last announcement by the store's clock; set by `Store.peers`."""
