"""Rollouts, attempts and who works on them, under the original's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    Protocol,
    TypedDict,
    TypeVar,
    overload,
)

import msgspec

from lightspan.agl._models import Model
from lightspan.agl._spans import Span, SpanCoreFields
from lightspan.errors import DataError

if TYPE_CHECKING:
    from lightspan.agl._agents import LitAgent

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

TaskInput = Any
RolloutMode = Literal["train", "val", "test"]
RolloutStatus = Literal[
    "queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"
]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
WorkerStatus = Literal["idle", "busy", "unknown"]
RolloutRawResult = float | list[Span] | list[SpanCoreFields] | None
"""What an agent may return: its reward, spans that it made, or nothing."""


class Triplet(Model):
    """One model call: what was asked, what was answered, what it earned."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class RolloutConfig(Model):
    """When an attempt is given up, and whether another follows."""

    timeout_seconds: float | None = None
    """None: no limit."""
    unresponsive_seconds: float | None = None
    """Without any span or heartbeat. None: no limit."""
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] = 1
    retry_condition: list[AttemptStatus] = msgspec.field(default_factory=list)
    """Ends of an attempt after which another follows, while `max_attempts` allows it."""


class Attempt(Model):
    """One try of a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1 for the first."""
    start_time: float
    """Seconds since the epoch."""
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None


class Rollout(Model):
    """One execution asked for on a task."""

    rollout_id: str
    input: TaskInput
    start_time: float
    """Seconds since the epoch."""
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None


class AttemptedRollout(Rollout, kw_only=True):
    """A rollout with its latest attempt. It is what agents get as `rollout`."""

    attempt: Attempt

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attempt.rollout_id != self.rollout_id:
            raise DataError(
                f"AttemptedRollout: the attempt belongs to {self.attempt.rollout_id!r}, not to "
                f"{self.rollout_id!r}"
            )


class EnqueueRolloutRequest(Model):
    """A rollout to be queued."""

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None


class Worker(Model):
    """Who works on rollouts."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: dict[str, Any] | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None


class PaginatedResult(Model, Generic[T]):
    """A part of what was found; a sequence."""

    items: Any
    limit: int
    """-1: no limit."""
    offset: int
    total: int
    """How many there are in all."""

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.items[index]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __contains__(self, item: object) -> bool:
        return item in self.items


Sequence.register(PaginatedResult)


class FilterField(TypedDict, total=False):
    """What a field has to be."""

    exact: Any
    within: Sequence[Any]
    contains: str


FilterOptions = Mapping[str, FilterField | Literal["and", "or"] | Mapping[str, FilterField]]


class SortOptions(TypedDict):
    """By which field, and which way."""

    name: str
    order: Literal["asc", "desc"]


class Dataset(Protocol[T_co]):
    """Anything with a length and items by number, such as a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class ParallelWorkerBase:
    """Something that is set up once, and once in each worker."""

    worker_id: int | None = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Before there are workers."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """In a worker, before it works."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The work."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """In a worker, after its work."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """After the workers."""


class Hook(ParallelWorkerBase):
    """Is told when an attempt begins and ends; override what you want to hear of."""

    async def on_rollout_start(
        self, *, agent: LitAgent[Any], runner: Any, rollout: Rollout
    ) -> None:
        """Before anything is recorded."""

    async def on_trace_start(
        self, *, agent: LitAgent[Any], runner: Any, tracer: Any, rollout: Rollout
    ) -> None:
        """What happens is recorded from here on."""

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Any, tracer: Any, rollout: Rollout
    ) -> None:
        """The agent has returned."""

    async def on_rollout_end(
        self, *, agent: LitAgent[Any], runner: Any, rollout: Rollout, spans: list[Span]
    ) -> None:
        """What was recorded is in the store."""
