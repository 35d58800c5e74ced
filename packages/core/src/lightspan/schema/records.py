"""What the store keeps beside spans: tasks, rollouts, attempts, token records, rewards.

The state machine of a rollout (R) and of its attempts (A). Everything not listed is illegal and
raises `IllegalMoveError`; repeating a move that already happened is a no-op (idempotence).

=========  ==========  =======================================================================
from       to          when
=========  ==========  =======================================================================
R queued   running     a runner claimed it: a new attempt A is `running`
R queued   cancelled   the algorithm cancelled it
R running  succeeded   its attempt reported `succeeded`
R running  failed      its attempt reported `failed` or `timeout` (an outcome of the app)
R running  queued      its attempt was `lost` and infrastructure tries are left
R running  lost        its attempt was `lost` and no infrastructure try is left
R running  cancelled   the algorithm cancelled it; its attempt becomes `cancelled`
A running  succeeded   the app returned
A running  failed      the app raised, overflowed the context or exhausted a budget
A running  timeout     the app ran longer than the rollout allows
A running  lost        the runner died, lost its lease or could not reach the store or gateway
A running  cancelled   the rollout was cancelled
=========  ==========  =======================================================================

`succeeded`, `failed`, `lost`, `cancelled` (rollout) and every attempt status but `running` are
final: a finished attempt is finished once, and what arrives later is kept, marked late, and never
trained.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any, Final

import msgspec

from lightspan.errors import IllegalMoveError
from lightspan.schema import clock
from lightspan.schema.ids import random_digits
from lightspan.schema.reward import Reward

Json = Any
"""A JSON value."""


class Mode(StrEnum):
    """What a rollout is for. It decides sampling: train and dev use the algorithm's, val the app's
    own."""

    TRAIN = "train"
    VAL = "val"
    DEV = "dev"
    PRODUCTION = "production"
    """Nobody asked for it: the app ran by itself and was recorded (`lightspan.record`). No runner
    can claim it, and no policy gradient is ever taken of it."""


class RolloutStatus(StrEnum):
    """Where a rollout is in its life; the module's table says what may follow what."""

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
    """Where an attempt is in its life; the module's table says what may follow what."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMEOUT = "timeout"
    LOST = "lost"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self is not AttemptStatus.RUNNING


LEGAL_ROLLOUT_MOVES: Final[frozenset[tuple[RolloutStatus, RolloutStatus]]] = frozenset(
    {
        (RolloutStatus.QUEUED, RolloutStatus.RUNNING),
        (RolloutStatus.QUEUED, RolloutStatus.CANCELLED),
        (RolloutStatus.RUNNING, RolloutStatus.SUCCEEDED),
        (RolloutStatus.RUNNING, RolloutStatus.FAILED),
        (RolloutStatus.RUNNING, RolloutStatus.QUEUED),
        (RolloutStatus.RUNNING, RolloutStatus.LOST),
        (RolloutStatus.RUNNING, RolloutStatus.CANCELLED),
    }
)
LEGAL_ATTEMPT_MOVES: Final[frozenset[tuple[AttemptStatus, AttemptStatus]]] = frozenset(
    (AttemptStatus.RUNNING, status) for status in AttemptStatus if status.final
)


def check_rollout_move(before: RolloutStatus, after: RolloutStatus) -> None:
    """Raise `IllegalMoveError` unless a rollout may go from `before` to `after`."""
    if (before, after) not in LEGAL_ROLLOUT_MOVES:
        raise IllegalMoveError(f"a rollout cannot go from {before} to {after}")


def check_attempt_move(before: AttemptStatus, after: AttemptStatus) -> None:
    """Raise `IllegalMoveError` unless an attempt may go from `before` to `after`."""
    if (before, after) not in LEGAL_ATTEMPT_MOVES:
        raise IllegalMoveError(f"an attempt cannot go from {before} to {after}")


def rollout_status_after(
    attempt: AttemptStatus, infrastructure_tries: int, max_infrastructure_tries: int
) -> RolloutStatus:
    """The rollout's status once its attempt ended.

    Args:
        attempt: the final status of the attempt.
        infrastructure_tries: tries used up by lost attempts, this one counted.
        max_infrastructure_tries: as the rollout allows.
    """
    match attempt:
        case AttemptStatus.SUCCEEDED:
            return RolloutStatus.SUCCEEDED
        case AttemptStatus.FAILED | AttemptStatus.TIMEOUT:
            return RolloutStatus.FAILED
        case AttemptStatus.CANCELLED:
            return RolloutStatus.CANCELLED
        case AttemptStatus.LOST:
            left = infrastructure_tries < max_infrastructure_tries
            return RolloutStatus.QUEUED if left else RolloutStatus.LOST
        case _:
            raise IllegalMoveError(f"attempt status {attempt} does not end an attempt")


_json_encoder: Final = msgspec.json.Encoder(order="deterministic")


def task_id(task: Json) -> str:
    """The task's own `id`, else a hash of its content: equal for equal tasks."""
    if isinstance(task, dict) and isinstance(task.get("id"), str | int):
        return str(task["id"])
    return fingerprint(task)


def fingerprint(value: Json) -> str:
    """A short hash of a JSON value: equal for equal values, in whatever order of keys."""
    return hashlib.sha256(_json_encoder.encode(value)).hexdigest()[:16]


def new_id(prefix: str) -> str:
    """A fresh id such as `call-18…`: the caller makes ids so that every write can be repeated.

    Ids begin with the time, so that those of one batch lie together in a store's indexes, and end
    with 64 random bits.
    """
    return f"{prefix}-{clock.now_ns():016x}{random_digits()}"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One execution asked for on a task, as the algorithm enqueues it. It never changes."""

    rollout_id: str
    task: Json
    """The input, as JSON."""
    task_id: str
    """Equal for equal tasks: the rollouts of a group share it."""
    run_id: str = ""
    """The training run that asked for it."""
    group_id: str = ""
    """The group whose rewards are compared; empty outside training."""
    mode: Mode = Mode.TRAIN
    resources_id: str = ""
    step: int = 0
    """The optimiser iteration, or evaluation, that asked for it."""
    timeout_s: float | None = None
    max_infrastructure_tries: int = 3
    app: str = ""
    """`module:name` of the app that it is for: no runner gives it to another. Empty: any."""


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with what became of it."""

    rollout: Rollout
    status: RolloutStatus
    infrastructure_tries: int = 0
    """Tries used up by lost attempts."""
    attempt_id: str | None = None
    """The latest attempt."""
    created_at: float = 0.0
    """Seconds since the epoch, by the store's clock."""
    finished_at: float | None = None
    change: int = 0
    """The cursor value of the latest status change (`Store.watch`)."""


class Outcome(StrEnum):
    """Why an attempt ended as it did; data, not exceptions (design law 4)."""

    OK = "ok"
    APP_ERROR = "app_error"
    TIMEOUT = "timeout"
    CONTEXT_OVERFLOW = "context_overflow"
    BUDGET = "budget"
    BAD_REWARD = "bad_reward"
    """The app returned something that is no reward."""
    INFRASTRUCTURE = "infrastructure"
    CANCELLED = "cancelled"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a rollout."""

    attempt_id: str
    rollout_id: str
    number: int
    """1 for the first try."""
    epoch: int
    """What every write of the runner must carry. Grows with each claim of the rollout."""
    status: AttemptStatus = AttemptStatus.RUNNING
    runner_id: str = ""
    call_token: str = ""
    """Opens this attempt's model calls at the gateway, and nothing else."""
    lease_until: float = 0.0
    """By the store's clock, in seconds since the epoch."""
    started_at: float = 0.0
    ended_at: float | None = None
    reward: Reward | None = None
    outcome: Outcome | None = None
    message: str = ""
    """What went wrong, for people."""
    capture_errors: list[str] = msgspec.field(default_factory=list)
    """Capture errors. An attempt with any is never trained."""

    @property
    def sealed(self) -> bool:
        """True once reported: what arrives later is late."""
        return self.status.final

    def report(
        self, status: AttemptStatus, outcome: Outcome, message: str = "", **fields: Any
    ) -> Report:
        """The report that ends this attempt so, under its own epoch."""
        return Report(
            attempt_id=self.attempt_id,
            epoch=self.epoch,
            status=status,
            outcome=outcome,
            message=message,
            **fields,
        )


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout and its new attempt, as a runner gets them."""

    rollout: Rollout
    attempt: Attempt
    alone: bool = False
    """Run it alone in its process: an attempt before it was in one that died, and it may be why."""


class AttemptRef(msgspec.Struct, frozen=True, order=True):
    """An attempt and the epoch under which somebody writes to it."""

    attempt_id: str
    epoch: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an attempt, as its runner tells it. It seals the attempt."""

    attempt_id: str
    epoch: int
    status: AttemptStatus
    outcome: Outcome = Outcome.OK
    reward: Reward | None = None
    message: str = ""
    capture_errors: list[str] = msgspec.field(default_factory=list)
    counts: bool = True
    """False for a lost attempt that uses up no try (a neighbour of a dead process)."""
    alone: bool = False
    """Of a lost attempt: the next one is to be run alone in its process (`Claim.alone`)."""


class PeerRole(StrEnum):
    """What a peer does."""

    TRAINER = "trainer"
    RUNNER = "runner"


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A process that works with a store, as it says itself now and then (`Store.announce`).

    Peers of other versions read it: fields are only ever added, with a default.
    """

    peer_id: str
    role: PeerRole
    app: str
    """`module:name`: what a trainer asks for, or a runner runs."""
    protocol: int
    """`semconv.PROTOCOL_VERSION` of its lightspan."""
    lightspan: str
    """The version of its lightspan."""
    python: str = ""
    """Its interpreter."""
    run_id: str = ""
    """The training run; of a runner, the only one that it works for (empty: any)."""
    slots: int = 0
    """Attempts at once of a runner."""
    complete: bool = False
    """A trainer's run has nothing left to do."""
    silent_s: float = 0.0
    """Seconds since it was heard of, by the store's clock."""
