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
import math
import secrets
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from lightspan.errors import DataError, IllegalMoveError, RewardError

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
    """Where a rollout is in its life (the table of the module)."""

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
    """Where an attempt is in its life (the table of the module)."""

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
    return f"{prefix}-{time.time_ns():016x}{secrets.token_hex(8)}"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One execution asked for on a task. What the algorithm enqueues; it never changes."""

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
    """Seconds since the epoch by the store's clock."""
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


class Reward(msgspec.Struct, frozen=True):
    """A reward: float64, or several named dimensions of which one is the value.

    `value` is None when the rollout is unscored, which is not zero (design law 4).
    """

    value: float | None
    dimensions: dict[str, float] = msgspec.field(default_factory=dict)


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
    """Seconds since the epoch by the store's clock."""
    started_at: float = 0.0
    ended_at: float | None = None
    reward: Reward | None = None
    outcome: Outcome | None = None
    message: str = ""
    """What went wrong, for people."""
    damage: list[str] = msgspec.field(default_factory=list)
    """Capture errors. An attempt with any is never trained."""

    @property
    def sealed(self) -> bool:
        """True once reported: what arrives later is late."""
        return self.status.final


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner gets: the rollout and its new attempt."""

    rollout: Rollout
    attempt: Attempt


class AttemptRef(msgspec.Struct, frozen=True, order=True):
    """An attempt and the epoch under which somebody writes to it."""

    attempt_id: str
    epoch: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner says at the end of an attempt. It seals the attempt."""

    attempt_id: str
    epoch: int
    status: AttemptStatus
    outcome: Outcome = Outcome.OK
    reward: Reward | None = None
    message: str = ""
    damage: list[str] = msgspec.field(default_factory=list)
    counts: bool = True
    """False: a lost attempt that uses up no try (a neighbour of a dead process)."""


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
    """`conventions.PROTOCOL_VERSION` of its lightspan."""
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


class CallOutcome(StrEnum):
    """What became of one model call."""

    OK = "ok"
    CANCELLED = "cancelled"
    """The client left; nobody got the answer."""
    UNDELIVERED = "undelivered"
    """Answered, but the answer did not arrive and no retry fetched it."""
    RESAMPLED = "resampled"
    """Sampled anew after a cancelled try whose tokens are gone: biased, so never trained."""
    ERROR = "error"


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. Log-probabilities are of this distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no truncation."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """True if nothing is truncated, so that the log-probabilities serve policy gradients."""
        return self.top_p >= 1.0 and self.top_k == 0 and self.temperature > 0


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The exact tokens of one choice of one call: (attempt, call id, choice index).

    Arrays are little-endian binary: ids int32, log-probabilities float32.
    """

    attempt_id: str
    call_id: str
    choice: int
    policy: str
    """The policy that sampled; empty when a frozen endpoint did."""
    prompt: bytes
    response: bytes
    logprob_data: bytes
    """float32 per response token, of the distribution sampled from."""
    versions: list[tuple[int, int]]
    """Run-length encoded policy versions of the response tokens: (version, number of tokens)."""
    sampling: Sampling = Sampling()
    finish_reason: FinishReason = FinishReason.STOP
    span_id: str = ""
    agent_path: str = ""
    sequence_start: int = 0
    sequence_end: int = 0
    outcome: CallOutcome = CallOutcome.OK
    constrained: bool = False
    """Sampled under a grammar or a forced tool choice."""
    late: bool = False

    @classmethod
    def create(
        cls,
        *,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Iterable[tuple[int, int]],
        **fields: Any,
    ) -> TokenRecord:
        """Build from plain sequences.

        Raises:
            DataError: lengths differ, a version run is not positive, or a log-probability is not
                a finite number <= 0 (within 1e-3).
        """
        runs = [(int(version), int(count)) for version, count in versions]
        if len(logprobs) != len(response_ids):
            raise DataError(f"{len(response_ids)} response ids but {len(logprobs)} log-probs")
        if sum(count for _, count in runs) != len(response_ids) or any(n <= 0 for _, n in runs):
            raise DataError(f"versions {runs} do not cover {len(response_ids)} response tokens")
        if any(not math.isfinite(value) or value > 1e-3 for value in logprobs):
            raise DataError("log-probabilities must be finite and at most 0")
        return cls(
            prompt=pack_ids(prompt_ids),
            response=pack_ids(response_ids),
            logprob_data=pack_floats(logprobs),
            versions=runs,
            **fields,
        )

    @property
    def prompt_ids(self) -> list[int]:
        return unpack_ids(self.prompt)

    @property
    def response_ids(self) -> list[int]:
        return unpack_ids(self.response)

    @property
    def logprobs(self) -> list[float]:
        return unpack_floats(self.logprob_data)


def pack_ids(ids: Sequence[int]) -> bytes:
    """int32 little-endian."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    return array("i", data).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """float32 little-endian."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """The inverse of `pack_floats`."""
    return array("f", data).tolist()


def parse_reward(value: Any, primary: str | None = None) -> Reward | None:
    """A reward from what a person wrote.

    None is no value at all (the result is None). A number or bool is a value; NaN and infinity are
    unscored. A mapping of names to numbers is named dimensions: `primary` names the one that is
    the value, by default the one called `"reward"`, else the first.

    Raises:
        RewardError: a string or any other type, or a primary that is not among the dimensions.
    """
    if value is None or isinstance(value, Reward):
        return value
    if isinstance(value, Mapping):
        return _parse_dimensions(value, primary)
    number = _number(value)
    return Reward(number if math.isfinite(number) else None)


def _parse_dimensions(value: Mapping[Any, Any], primary: str | None) -> Reward:
    if not value:
        raise RewardError("a reward with named dimensions needs at least one: got {}")
    dimensions = {str(name): _number(number) for name, number in value.items()}
    chosen = primary or ("reward" if "reward" in dimensions else next(iter(dimensions)))
    if chosen not in dimensions:
        raise RewardError(f"primary reward {chosen!r} is not among {sorted(dimensions)}")
    number = dimensions[chosen]
    finite = {name: number for name, number in dimensions.items() if math.isfinite(number)}
    return Reward(number if math.isfinite(number) else None, finite)


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise RewardError(f"a reward must be a number, not the text {value!r}; convert it first")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"a reward must be a number, a bool, None or a mapping of names to numbers, "
            f"not {type(value).__name__}: {value!r}"
        ) from error
    except OverflowError as error:
        raise RewardError("a reward must be a number that a float can hold") from error
