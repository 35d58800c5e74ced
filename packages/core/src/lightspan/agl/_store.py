"""The original's store API over lightspan's stores.

A rollout is one of lightspan's; what that has no field for is in `_records`. A version of the
resources is kept among lightspan's, and a log of versions says which are in force under which id.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypedDict

from lightspan.agl._liveness import LEASE_S
from lightspan.agl._queries import Logic, Order, contains, exactly, matching, page, within
from lightspan.agl._records import ENVELOPE, FINAL, Asked, asked_of, lost_report, packed, worker_of
from lightspan.agl._resources import NamedResources, ResourcesUpdate, check_resources
from lightspan.agl._rollouts import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
    Worker,
    WorkerStatus,
)
from lightspan.agl._spans import Span
from lightspan.agl._translation import to_span
from lightspan.agl._views import StoreViews
from lightspan.errors import ConfigError, NotFoundError, UnsupportedError
from lightspan.schema import clock, records as r
from lightspan.schema.prompts import PromptTemplate as KeptTemplate
from lightspan.stores import open_store, public_url

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_LOG: Final = "lightspan.agl.resources"
"""The name under which lightspan's store numbers the versions of the resources."""
_PAUSE_S: Final = 1.0
"""Longest wait between two looks at limits of time, while somebody waits for rollouts."""


class _Unset:
    """What is left as it is."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()


class LightningStoreCapabilities(TypedDict, total=False):
    """What a store can do."""

    thread_safe: bool
    async_safe: bool
    zero_copy: bool
    otlp_traces: bool


class LightningStoreStatistics(TypedDict, total=False):
    """What is in a store."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: float
    """Seconds since it was made here."""


class LightningStore(StoreViews):
    """Rollouts, attempts, spans and resources for an algorithm and its runners.

    Args:
        store: of lightspan; opened at the first use.
    """

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return {
            "thread_safe": True,
            "async_safe": True,
            "zero_copy": self.store.capabilities.multi_process,
            "otlp_traces": False,
        }

    async def close(self) -> None:
        """Close it; the next use opens it again."""
        self._is_open = False
        await self.store.close()

    async def statistics(self) -> LightningStoreStatistics:
        store = await self._opened()
        rollouts = await store.rollouts()
        attempts = await store.attempts([state.rollout.rollout_id for state in rollouts])
        spans = await store.spans([attempt.attempt_id for attempt in attempts])
        return {
            "name": type(self).__name__,
            "total_rollouts": len(rollouts),
            "total_attempts": len(attempts),
            "total_spans": sum(map(len, spans.values())),
            "total_resources": len(await self._logged()),
            "total_workers": len({attempt.runner_id for attempt in attempts} | set(self._workers)),
            "uptime": time.time() - self._began,
        }

    def otlp_traces_endpoint(self) -> NoReturn:
        """Raises `UnsupportedError`."""
        raise UnsupportedError(
            "otlp_traces_endpoint: the store takes no OTLP; use add_span or add_otel_span"
        )

    # --- rollouts -------------------------------------------------------------------------
    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Rollout:
        """Queue a rollout; without `resources_id` it gets the latest resources."""
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        [queued] = await self.enqueue_many_rollouts([request])
        return queued

    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest]
    ) -> Sequence[Rollout]:
        """Queue rollouts, in order."""
        store = await self._watched()
        made = [await self._made(request) for request in rollouts]
        await store.enqueue(made)
        return await self._seen([rollout.rollout_id for rollout in made])

    async def _made(self, request: EnqueueRolloutRequest, run_id: str = "") -> r.Rollout:
        """The rollout of lightspan that a request asks for."""
        config = request.config or RolloutConfig()
        version = await self._version(request.resources_id)
        kept = "" if version is None else version[1]
        task = packed(
            Asked(
                request.input,
                request.mode,
                {} if config == RolloutConfig() else config.model_dump(),
                request.metadata or {},
                request.resources_id if version is None else version[0].resources_id,
            )
        )
        return r.Rollout(
            rollout_id=r.new_id("rollout"),
            task=task,
            task_id=r.task_id(request.input),
            run_id=run_id,
            mode=r.Mode.TRAIN if request.mode == "train" else r.Mode.VAL,
            resources_id=kept,
            timeout_s=config.timeout_seconds,
            max_infrastructure_tries=config.max_attempts,
        )

    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        """A rollout that is never queued: its first attempt is this caller's."""
        store = await self._watched()
        request = EnqueueRolloutRequest(
            input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
        )
        rollout = await self._made(request, run_id=r.new_id("start"))
        await store.enqueue([rollout])
        await store.claim(worker_id or "", 1, LEASE_S, rollout.run_id)  # nobody else asks for it
        return await self._attempted(rollout.rollout_id)

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        """The oldest rollout that is queued, with a new attempt; None if there is none."""
        return next(iter(await self.dequeue_many_rollouts(worker_id=worker_id)), None)

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        """At most `limit` of them."""
        store = await self._watched()
        if worker_id is not None:
            self._workers.setdefault(worker_id, {})["last_dequeue_time"] = time.time()
        claims = await store.claim(worker_id or "", limit, LEASE_S)
        return [await self._attempted(claim.rollout.rollout_id) for claim in claims]

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> NoReturn:
        """Raises `UnsupportedError`."""
        raise UnsupportedError(
            f"start_attempt({rollout_id!r}): attempts begin when a rollout is dequeued, one at a "
            "time; use dequeue_rollout, or start_rollout for a rollout that is not queued"
        )

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """The rollout, with its latest attempt if there is any; None if it is unknown."""
        await self._watched()
        return next(iter(await self._seen([rollout_id])), None)

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: Logic = "and",
        sort_by: str | None = None,
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[Rollout]:
        """Rollouts that match; `status` and `rollout_ids` are older names of the first two."""
        await self._watched()
        wanted = status_in if status_in is not None else status
        ids = rollout_id_in if rollout_id_in is not None else rollout_ids
        conditions = [
            *within("status", wanted),
            *within("rollout_id", ids),
            *contains("rollout_id", rollout_id_contains),
        ]
        states = await self._filtered(wanted, ids) if filter_logic == "and" else None
        views = await (self._seen() if states is None else self._views(states))
        found = matching(views, conditions, filter_logic)
        return page(found, sort_by, sort_order, limit, offset)

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[Rollout]:
        """Those that have ended, after all have or `timeout` seconds."""
        end = None if timeout is None else clock.monotonic() + timeout
        store = await self._watched()
        states = await self._states(rollout_ids)
        open_ids = {state.rollout.rollout_id for state in states if not state.status.final}
        cursor = max((state.change for state in states), default=0)
        while open_ids:  # only what changes is read: a look at all, each time, would be quadratic
            left = _PAUSE_S if end is None else min(_PAUSE_S, end - clock.monotonic())
            if left <= 0:
                break
            changes = await store.watch(cursor, timeout_s=left)
            cursor = changes.cursor
            open_ids -= {s.rollout.rollout_id for s in changes.rollouts if s.status.final}
            await self._watched()
        states = await self._states(rollout_ids)
        return await self._views([state for state in states if state.status.final])

    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput = UNSET,
        mode: RolloutMode | None = UNSET,
        resources_id: str | None = UNSET,
        status: RolloutStatus = UNSET,
        config: RolloutConfig = UNSET,
        metadata: dict[str, Any] | None = UNSET,
    ) -> Rollout:
        """Say how a rollout ends.

        Raises:
            UnsupportedError: something else is to change; or it ends and has not begun.
            DataError: it is unknown.
        """
        changed = {
            "input": input,
            "mode": mode,
            "resources_id": resources_id,
            "config": config,
            "metadata": metadata,
        }
        _refuse_changes("update_rollout", changed, "a rollout never changes; enqueue another")
        store = await self._watched()
        rollout = await self._known(rollout_id)
        if status is not UNSET and rollout.status not in FINAL and status != rollout.status:
            attempt = await self._latest(rollout_id)
            if status == "cancelled":
                await store.cancel([rollout_id])
            elif attempt is None or attempt.sealed:
                raise UnsupportedError(
                    f"update_rollout({rollout_id!r}, status={status!r}): it is {rollout.status}, "
                    "and ends only by an attempt or as cancelled"
                )
            elif status in ("succeeded", "failed"):
                await self._end(attempt, status, RolloutConfig())
            elif status in ("queuing", "requeuing"):
                await store.report([lost_report(attempt, "failed", counts=False)])
        return await self._known(rollout_id)

    # --- attempts -------------------------------------------------------------------------
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Every attempt of a rollout."""
        store = await self._watched()
        try:
            attempts = await store.attempts([rollout_id])
        except NotFoundError:
            attempts = []
        views = [await self._attempt(attempt) for attempt in attempts]
        return page(views, sort_by, sort_order, limit, offset)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The latest attempt of a rollout; None if there is none."""
        await self._watched()
        attempt = await self._latest(rollout_id)
        return None if attempt is None else await self._attempt(attempt)

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus = UNSET,
        worker_id: str = UNSET,
        last_heartbeat_time: float = UNSET,
        metadata: dict[str, Any] | None = UNSET,
    ) -> Attempt:
        """Say that an attempt lives, or how it ends. One that has ended stays so.

        Args:
            attempt_id: or "latest".

        Raises:
            UnsupportedError: something else is to change.
            DataError: it is unknown.
        """
        changed = {"worker_id": worker_id, "metadata": metadata}
        _refuse_changes("update_attempt", changed, "say who works when you dequeue; emit the rest")
        await self._watched()
        attempt = await self._attempt_of(rollout_id, attempt_id)
        if last_heartbeat_time is not UNSET or status in ("preparing", "running"):
            heard = time.time() if last_heartbeat_time is UNSET else last_heartbeat_time
            await self._liveness.hear(attempt, heard)
        if status is not UNSET and status not in ("preparing", "running") and not attempt.sealed:
            limits = asked_of((await self._state(rollout_id)).rollout).limits
            await self._end(attempt, status, limits)
        return await self._attempt(await self.store.attempt(attempt.attempt_id))

    async def mark_damaged(self, attempt_id: str, reason: str) -> None:
        """Something of the attempt was not recorded: it is never trained."""
        store = await self._opened()
        await store.mark_damaged(attempt_id, reason)

    # --- spans ----------------------------------------------------------------------------
    async def add_span(self, span: Span) -> Span | None:
        """Keep a span; None if its id is known already.

        Raises:
            DataError: its rollout or attempt is unknown.
        """
        return next(iter(await self.add_many_spans([span])), None)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Keep spans; returns those whose id was not known.

        Raises:
            DataError: a rollout or attempt is unknown.
        """
        store = await self._opened()
        kept: list[Span] = []
        for attempt_id in dict.fromkeys(span.attempt_id for span in spans):
            mine = [span for span in spans if span.attempt_id == attempt_id]
            attempt = await self._attempt_of(mine[0].rollout_id, attempt_id)
            known = {span.span_id for span in (await store.spans([attempt_id]))[attempt_id]}
            new = [span for span in mine if span.span_id not in known]
            await store.add_spans(
                r.AttemptRef(attempt_id, attempt.epoch), [to_span(span) for span in new]
            )
            self._liveness.heard_now(attempt_id)
            rollout_id = attempt.rollout_id
            numbers = [span.sequence_id for span in mine]
            self._numbers[rollout_id] = max(self._numbers.get(rollout_id, 0), *numbers)
            kept += new
        return kept

    async def add_otel_span(
        self,
        rollout_id: str,
        attempt_id: str,
        readable_span: ReadableSpan,
        sequence_id: int | None = None,
    ) -> Span | None:
        """`add_span` of a span of OpenTelemetry's SDK."""
        if sequence_id is None:
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(
            Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id)
        )

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """A number that no span of the rollout has."""
        if rollout_id not in self._numbers:
            spans = await self._every_span(rollout_id)
            latest = max((span.sequence_id for span in spans), default=0)
            self._numbers[rollout_id] = max(self._numbers.get(rollout_id, 0), latest)
        self._numbers[rollout_id] += 1
        return self._numbers[rollout_id]

    async def get_many_span_sequence_ids(
        self, rollout_attempt_ids: Sequence[tuple[str, str]]
    ) -> Sequence[int]:
        """One for each (rollout, attempt)."""
        return [await self.get_next_span_sequence_id(*ids) for ids in rollout_attempt_ids]

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: Logic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: Order = "asc",
    ) -> PaginatedResult[Span]:
        """Spans of a rollout, of one of its attempts, or of the "latest"."""
        await self._watched()
        spans = await self._every_span(rollout_id)
        if attempt_id == "latest":
            latest = await self._latest(rollout_id)
            attempt_id = "" if latest is None else latest.attempt_id
        if attempt_id is not None:
            spans = [span for span in spans if span.attempt_id == attempt_id]
        conditions = [
            *exactly("trace_id", trace_id),
            *contains("trace_id", trace_id_contains),
            *exactly("span_id", span_id),
            *contains("span_id", span_id_contains),
            *exactly("parent_id", parent_id),
            *contains("parent_id", parent_id_contains),
            *exactly("name", name),
            *contains("name", name_contains),
        ]
        found = matching(spans, conditions, filter_logic)
        return page(found, sort_by, sort_order, limit, offset)

    # --- resources ------------------------------------------------------------------------
    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        """A first version, under an id of its own."""
        return await self.update_resources(r.new_id("resources"), resources)

    async def update_resources(
        self, resources_id: str, resources: NamedResources
    ) -> ResourcesUpdate:
        """The next version under an id.

        Raises:
            ConfigError: one of them is no resource; or holds a key, and the store is a file.
        """
        resources = check_resources(resources)
        store = await self._opened()
        if store.capabilities.durable:
            _refuse_keys(resources)
        now = time.time()
        before = await self._version(resources_id)
        update = ResourcesUpdate(
            resources_id=resources_id,
            create_time=now if before is None else before[0].create_time,
            update_time=now,
            version=1 if before is None else before[0].version + 1,
            resources=resources,
        )
        template = KeptTemplate(template=update.model_dump_json())
        kept = await store.put_resources({ENVELOPE: template})
        await store.allot_version(_LOG, run_id=kept)
        return update

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """The latest version under each id."""
        conditions = [
            *exactly("resources_id", resources_id),
            *contains("resources_id", resources_id_contains),
        ]
        updates = [copy.deepcopy(update) for update, _ in (await self._logged()).values()]
        return page(matching(updates, conditions, "and"), sort_by, sort_order, limit, offset)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """The latest version under an id; None if it is unknown."""
        found = await self._version(resources_id)
        return None if found is None else copy.deepcopy(found[0])

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The version that was made last; None if there is none."""
        found = await self._version(None)
        return None if found is None else copy.deepcopy(found[0])

    async def _version(self, resources_id: str | None) -> tuple[ResourcesUpdate, str] | None:
        """The version in force under an id (None: the latest of all), and its id in the store."""
        logged = await self._logged()
        if resources_id is not None:
            return logged.get(resources_id)
        return max(logged.values(), key=lambda found: found[0].update_time, default=None)

    async def _logged(self) -> dict[str, tuple[ResourcesUpdate, str]]:
        """Id → the latest version under it, and its id in lightspan's store."""
        store = await self._opened()
        logged: dict[str, tuple[ResourcesUpdate, str]] = {}
        for version in await store.policy_versions(_LOG):
            if version.run_id not in self._updates:
                kept = (await store.get_resources(version.run_id))[ENVELOPE]
                assert isinstance(kept, KeptTemplate)
                update = ResourcesUpdate.model_validate_json(kept.template)
                self._updates[version.run_id] = update
            update = self._updates[version.run_id]
            logged[update.resources_id] = update, version.run_id
        return logged

    # --- workers --------------------------------------------------------------------------
    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: Logic = "and",
        sort_by: str | None = None,
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Everybody who has dequeued or said something."""
        conditions = [*within("status", status_in), *contains("worker_id", worker_id_contains)]
        found = matching(await self._everybody(), conditions, filter_logic)
        return page(found, sort_by, sort_order, limit, offset)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """The worker; None if nobody has heard of it."""
        return next((w for w in await self._everybody() if w.worker_id == worker_id), None)

    async def update_worker(
        self, worker_id: str, heartbeat_stats: dict[str, Any] = UNSET
    ) -> Worker:
        """A sign of life of a worker."""
        said = self._workers.setdefault(worker_id, {})
        said["last_heartbeat_time"] = time.time()
        if heartbeat_stats is not UNSET:
            said["heartbeat_stats"] = heartbeat_stats
        found = await self.get_worker_by_id(worker_id)
        assert found is not None
        return found

    async def _everybody(self) -> list[Worker]:
        store = await self._watched()
        states = await store.rollouts()
        attempts = await store.attempts([state.rollout.rollout_id for state in states])
        latest = {
            attempt.runner_id: attempt
            for attempt in sorted(attempts, key=lambda attempt: attempt.started_at)
            if attempt.runner_id
        }
        names = {**latest, **self._workers}
        return [
            worker_of(name, latest.get(name), self._workers.get(name, {})) for name in sorted(names)
        ]


class InMemoryLightningStore(LightningStore):
    """A store of this process: what is in it ends with it.

    Args:
        thread_safe: accepted; it always is.
        eviction_memory_threshold: must be None: nothing is dropped to save memory.
        safe_memory_threshold: likewise.
        span_size_estimator: accepted.
        tracker: must be None.
        scan_debounce_seconds: accepted; limits of time are looked at whenever it is asked.

    Raises:
        UnsupportedError: an option that cannot be honoured.
    """

    def __init__(
        self,
        *,
        thread_safe: bool = False,
        eviction_memory_threshold: float | None = None,
        safe_memory_threshold: float | None = None,
        span_size_estimator: Callable[[Span], int] | None = None,
        tracker: Any = None,
        scan_debounce_seconds: float = 10.0,
    ) -> None:
        refused = {
            "eviction_memory_threshold": eviction_memory_threshold,
            "safe_memory_threshold": safe_memory_threshold,
            "tracker": tracker,
        }
        for name, value in refused.items():
            if value is not None:
                raise UnsupportedError(
                    f"InMemoryLightningStore({name}={value!r}): leave it out; a store that grows "
                    "large is a file: LightningStoreClient('sqlite:///…')"
                )
        super().__init__(open_store("memory:"))


class LightningStoreClient(LightningStore):
    """A store that several processes share: each has a client of its own.

    Args:
        server_address: what `lightspan.stores.open_store` takes, such as `sqlite:///…/store.db`.
        retry_delays: accepted; a file needs no retries.
        health_retry_delays: likewise.
        request_timeout: likewise.
        connection_timeout: likewise.

    Raises:
        ConfigError: it names no store; or the address of a server, which there is none of.
    """

    def __init__(
        self,
        server_address: str | os.PathLike[str],
        *,
        retry_delays: Sequence[float] = (),
        health_retry_delays: Sequence[float] = (),
        request_timeout: float = 30.0,
        connection_timeout: float = 5.0,
    ) -> None:
        address = os.fspath(server_address)
        if address.startswith(("http://", "https://")):
            raise ConfigError(
                f"LightningStoreClient({address!r}): there is no server of the original's store "
                "here; use the store that the processes share, such as 'sqlite:///path/store.db'"
            )
        super().__init__(open_store(address))
        self.server_address = public_url(address)


def _refuse_changes(what: str, changed: Mapping[str, Any], instead: str) -> None:
    for name, value in changed.items():
        if value is not UNSET:
            raise UnsupportedError(f"{what}({name}={value!r:.100}): {instead}")


def _refuse_keys(resources: NamedResources) -> None:
    for name, resource in resources.items():
        if getattr(resource, "api_key", None):
            raise ConfigError(
                f"the resource {name!r} has an api_key, and the store is a file, where no key is "
                "written: leave it out, and have the agent read the key from its environment"
            )
