"""Runners for stores of the original's API: take a rollout, run the agent, say how it went."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

from lightspan.agl._agents import LitAgent, rollout_method
from lightspan.agl._emit import emit_reward
from lightspan.agl._events import ExecutionEvent
from lightspan.agl._resources import NamedResources
from lightspan.agl._rollouts import (
    AttemptedRollout,
    AttemptStatus,
    Hook,
    ParallelWorkerBase,
    Rollout,
    RolloutMode,
)
from lightspan.agl._spans import Span
from lightspan.agl._store import LightningStore
from lightspan.agl._tracers import Tracer
from lightspan.agl._translation import as_span
from lightspan.errors import AppError, ConfigError, RewardError
from lightspan.schema import clock

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S = 0.05
"""Between two looks at the event that ends a runner."""


class Runner(ParallelWorkerBase, Generic[T]):
    """Runs an agent on rollouts of a store: override `iter` and `step`."""

    agent: LitAgent[T] | None = None
    store: LightningStore | None = None
    hooks: Sequence[Hook] = ()

    def init(
        self, agent: LitAgent[T], *, hooks: Sequence[Hook] | None = None, **kwargs: Any
    ) -> None:
        """Take the agent on."""
        self.agent, self.hooks = agent, hooks or ()

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        """Work for this store."""
        super().init_worker(worker_id)
        self.store = store

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Work for it no longer."""
        self.store = None

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Let the agent go."""
        self.agent, self.hooks = None, ()

    @contextmanager
    def run_context(
        self,
        *,
        agent: LitAgent[T],
        store: LightningStore,
        hooks: Sequence[Hook] | None = None,
        worker_id: int | None = None,
    ) -> Iterator[Self]:
        """Ready to work in the block."""
        number = worker_id or 0
        self.init(agent, hooks=hooks)
        try:
            self.init_worker(number, store)
            try:
                yield self
            finally:
                self.teardown_worker(number)
        finally:
            self.teardown()

    async def iter(self, *, event: ExecutionEvent | None = None) -> None:
        """Work on what is queued until the event is set."""
        raise AppError(f"{type(self).__qualname__} must define iter(self, *, event)")

    async def step(
        self,
        input: T,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: ExecutionEvent | None = None,
    ) -> Rollout:
        """Work on this task, which is not queued."""
        raise AppError(f"{type(self).__qualname__} must define step(self, input, …)")


class LitAgentRunner(Runner[T]):
    """Runs a `LitAgent`, one rollout at a time; several runners share a process.

    Args:
        tracer: records what the agent does; each runner has one of its own.
        max_rollouts: how many to work on; None: no limit.
        poll_interval: seconds between two looks at an empty queue.
        heartbeat_interval: accepted; the worker gives a sign of life with each rollout.
        interval_jitter: accepted.
        heartbeat_launch_mode: accepted.
        heartbeat_include_gpu: accepted.
    """

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        interval_jitter: float = 0.5,
        heartbeat_launch_mode: Literal["asyncio", "thread"] = "thread",
        heartbeat_include_gpu: bool = False,
    ) -> None:
        self.tracer = tracer
        self._most = max_rollouts
        self._poll_s = poll_interval

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        super().init_worker(worker_id, store)
        # of its own: the event loop's has room for a few agents only
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.get_worker_id())
        self.tracer.init()
        self.tracer.init_worker(worker_id, store)

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        self.tracer.teardown_worker(worker_id)
        self.tracer.teardown()
        self._thread.shutdown(wait=False)
        super().teardown_worker(worker_id)

    def get_worker_id(self) -> str:
        """Its name in the store."""
        return f"Worker-{self.worker_id}"

    def get_agent(self) -> LitAgent[T]:
        """Raises `ConfigError` outside `run_context`."""
        return self._ready()[0]

    def get_store(self) -> LightningStore:
        """Raises `ConfigError` outside `run_context`."""
        return self._ready()[1]

    def _ready(self) -> tuple[LitAgent[T], LightningStore]:
        if self.agent is None or self.store is None:
            raise ConfigError("the runner has no agent and store yet: use it in run_context(…)")
        return self.agent, self.store

    async def iter(self, *, event: ExecutionEvent | None = None) -> None:
        """Work on what is queued until the event is set, or on as many as it is to."""
        done = 0
        while not _is_set(event) and (self._most is None or done < self._most):
            rollout = await self.get_store().dequeue_rollout(worker_id=self.get_worker_id())
            if rollout is None:
                await self._pause(event)
                continue
            await self._work(rollout)
            done += 1

    async def _pause(self, event: ExecutionEvent | None) -> None:
        end = clock.monotonic() + self._poll_s
        while not _is_set(event) and (left := end - clock.monotonic()) > 0:  # noqa: ASYNC110
            # an event of another process cannot be awaited
            await asyncio.sleep(left if event is None else min(left, _LOOK_S))

    async def step(
        self,
        input: T,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: ExecutionEvent | None = None,
    ) -> Rollout:
        """Work on this task.

        Args:
            input: the task.
            resources: None: the latest of the store.
            mode: None is no mode, which `validation_rollout` runs, as it does "val" and "test".
            event: accepted.

        Raises:
            What the agent raises.
        """
        store = self.get_store()
        update = None if resources is None else await store.add_resources(resources)
        rollout = await store.start_rollout(
            input,
            mode=mode,
            resources_id=None if update is None else update.resources_id,
            worker_id=self.get_worker_id(),
        )
        error = await self._work(rollout)
        if error is not None:
            raise error
        ended = await store.get_rollout_by_id(rollout.rollout_id)
        assert ended is not None
        return ended

    async def _work(self, rollout: AttemptedRollout) -> BaseException | None:
        """Run the agent, keep what it did, say how it ended; returns what it raised."""
        agent, store = self._ready()
        told: dict[str, Any] = {"agent": agent, "runner": self, "rollout": rollout}
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        failure: BaseException | None = None
        spans: list[Span] = []
        try:
            await self._tell("on_rollout_start", **told)
            async with self.tracer.trace_context(
                rollout_id, rollout_id=rollout_id, attempt_id=attempt_id
            ):
                await self._tell("on_trace_start", **told, tracer=self.tracer)
                value = await self._call(agent, rollout)
                await self._tell("on_trace_end", **told, tracer=self.tracer)
                if isinstance(value, int | float):
                    emit_reward(value)
            spans = [*self.tracer.get_last_trace(), *await self._keep(value, rollout)]
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit too: the agent gives up, not its runner
            if isinstance(error, asyncio.CancelledError) and _being_cancelled():
                raise
            log.exception("rollout %s failed", rollout.rollout_id)
            failure = error
        await self._tell("on_rollout_end", **told, spans=spans)
        ended: AttemptStatus = "succeeded" if failure is None else "failed"
        await store.update_attempt(rollout_id, attempt_id, status=ended)
        return failure

    async def _call(self, agent: LitAgent[T], rollout: AttemptedRollout) -> Any:
        store = self.get_store()
        update = (
            await store.get_resources_by_id(rollout.resources_id)
            if rollout.resources_id
            else await store.get_latest_resources()
        )
        resources = {} if update is None else update.resources
        method = rollout_method(agent, rollout.mode)
        if agent.is_async():
            return await method(rollout.input, resources=resources, rollout=rollout)
        # in a thread, with this context: an agent that works for long must not stop the others
        work = partial(method, rollout.input, resources=resources, rollout=rollout)
        value = await asyncio.get_running_loop().run_in_executor(
            self._thread, copy_context().run, _outcome, work
        )
        if isinstance(value, _Raised):
            raise value.error
        return value

    async def _keep(self, value: Any, rollout: AttemptedRollout) -> Sequence[Span]:
        """Keep spans that an agent has returned.

        Raises:
            RewardError: it has returned something else than spans, a number or None.
        """
        if value is None or isinstance(value, int | float):
            return ()
        if not isinstance(value, list):
            raise RewardError(f"the agent returned {value!r:.200}: not a number, None or spans")
        store, ids = self.get_store(), (rollout.rollout_id, rollout.attempt.attempt_id)
        return await store.add_many_spans(
            [as_span(item, *ids, await store.get_next_span_sequence_id(*ids)) for item in value]
        )

    async def _tell(self, what: str, **told: Any) -> None:
        for hook in self.hooks:
            try:
                await getattr(hook, what)(**told)
            except Exception:  # a hook's author's mistake must not cost the rollout
                log.exception("%s.%s failed", type(hook).__qualname__, what)


class _Raised(NamedTuple):
    """What a sync agent raised, as a value: a future takes no StopIteration, and never ends."""

    error: BaseException


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except BaseException as error:
        return _Raised(error)


def _being_cancelled() -> bool:
    """Whether somebody outside cancels the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_set(event: ExecutionEvent | None) -> bool:
    return event is not None and event.is_set()
