"""Tracers: what happens in a block, as spans.

lightspan records by itself wherever an agent runs. A tracer is for code of one's own: it opens a
scope around a block, and says afterwards what happened there.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightspan.agl._rollouts import ParallelWorkerBase
from lightspan.agl._spans import (
    Span,
    SpanCoreFields,
    SpanRecordingContext,
    StatusCode,
    TraceStatus,
)
from lightspan.agl._translation import exception_attributes, from_core, from_span
from lightspan.capture.entry import open_scope
from lightspan.capture.recorder import Recorder
from lightspan.capture.scope import Scope, acting, make_span, pushed, reset_acting, set_acting
from lightspan.errors import ConfigError
from lightspan.schema.records import new_id
from lightspan.schema.spans import Attributes, Span as OurSpan, SpanKind

if TYPE_CHECKING:
    from lightspan.agl._store import LightningStore

log = logging.getLogger(__name__)

T = TypeVar("T")

_LIFE_S: Final = 0.5
"""Between two looks whether there is a sign of life."""
_active: ContextVar[Tracer | None] = ContextVar("lightspan_agl_tracer", default=None)
"""A variable of the context, because several runners share a process."""


def get_active_tracer() -> Tracer | None:
    """The tracer that was set, and not cleared since."""
    return _active.get()


def set_active_tracer(tracer: Tracer) -> None:
    """Have `emit_*` and `operation` go to this tracer.

    Raises:
        ConfigError: another is set already.
    """
    if _active.get() is not None:
        raise ConfigError("there is an active tracer already: clear_active_tracer() first")
    _active.set(tracer)


def clear_active_tracer() -> None:
    """Have `emit_*` and `operation` go to no tracer any more; nothing if they did not."""
    _active.set(None)


class Heard(Recorder):
    """A recorder that knows when it last heard of its attempt."""

    last: float | None = None

    def add(self, span: OurSpan) -> None:
        super().add(span)
        self.last = time.time()


async def _tell_of_life(
    recorder: Heard, store: LightningStore, rollout_id: str, attempt_id: str
) -> None:
    """Tell the store while the attempt says something: its spans come there at its end."""
    told = None
    while True:
        await asyncio.sleep(_LIFE_S)
        if recorder.last == told:
            continue
        told = recorder.last
        try:
            await store.update_attempt(rollout_id, attempt_id, status="running")
        except Exception as error:  # what is wrong with the store is told at the end, too
            log.warning("no sign of life of attempt %s: %s", attempt_id, error)


class Tracer(ParallelWorkerBase):
    """Records what happens in a block.

    A subclass that overrides `create_span` and `operation_context` gets what `emit_*` and
    `operation` say while it is active.
    """

    def __init__(self) -> None:
        self._store: LightningStore | None = None
        self._last: list[Span] = []
        self._damages: list[str] = []
        """Why the last block was not recorded whole."""

    def init_worker(
        self, worker_id: int, store: LightningStore | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Be ready to record; `store` is where spans of an attempt are kept."""
        super().init_worker(worker_id)
        self._store = store

    @contextmanager
    def lifespan(self, store: LightningStore | None = None) -> Iterator[None]:
        """Set up for a block, as worker 0."""
        self.init()
        self.init_worker(0, store)
        try:
            yield
        finally:
            self.teardown_worker(0)
            self.teardown()

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncIterator[Tracer]:
        """Record what happens in the block; with both ids, into the store too.

        Raises:
            ConfigError: one id without the other, or ids without a store.
        """
        store = store or self._store
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError("trace_context takes both rollout_id= and attempt_id=, or none")
        if rollout_id is not None and store is None:
            raise ConfigError("trace_context of an attempt needs a store: lifespan(store)")
        try:
            with self._recorded(rollout_id, attempt_id) as recorder:
                if store is None or rollout_id is None or attempt_id is None:
                    yield self
                    return
                life = asyncio.create_task(_tell_of_life(recorder, store, rollout_id, attempt_id))
                try:
                    yield self
                finally:
                    life.cancel()
        finally:
            if store is not None and rollout_id is not None and attempt_id is not None:
                await self._keep(store, rollout_id, attempt_id)

    async def _keep(self, store: LightningStore, rollout_id: str, attempt_id: str) -> None:
        """Put the spans of the last block into a store."""
        ids = [(rollout_id, attempt_id)] * len(self._last)
        for span, number in zip(
            self._last, await store.get_many_span_sequence_ids(ids), strict=True
        ):
            span.sequence_id = number
        self._last = list(await store.add_many_spans(self._last))
        for reason in self._damages:
            await store.mark_damaged(attempt_id, reason)

    @contextmanager
    def _recorded(self, rollout_id: str | None, attempt_id: str | None) -> Iterator[Heard]:
        recorder = Heard()
        scope = Scope(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or new_id("attempt"),
            recorder=recorder,
        )
        set_active_tracer(self)
        try:
            with open_scope(scope):
                yield recorder
        finally:
            clear_active_tracer()
            scope.recorder.is_over = True
            scope.recorder.give_up()
            spans = [span.replace(attempt_id=attempt_id or "") for span in scope.recorder.drain()]
            ordered = sorted(spans, key=lambda span: span.start_ns)
            self._last = [from_span(span, number) for number, span in enumerate(ordered, 1)]
            self._damages = scope.recorder.damages()
            for reason in self._damages:
                log.warning("not everything was recorded: %s", reason)

    def trace_run(self, func: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Record what the function does."""
        with self._recorded(None, None):
            return func(*args, **kwargs)

    async def trace_run_async(
        self, func: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any
    ) -> T:
        """`trace_run` for functions that await."""
        async with self.trace_context(getattr(func, "__name__", None)):
            return await func(*args, **kwargs)

    def get_last_trace(self) -> list[Span]:
        """The spans of the last block, by when they began."""
        return self._last

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Record something that takes no time. Outside every rollout it is recorded nowhere."""
        core = instant(name, attributes, timestamp, status)
        current = acting()
        if current is not None:
            span = make_span(current, name, SpanKind.OTHER, {})
            current.scope.recorder.add(from_core(core, span))
        return core

    @contextmanager
    def operation_context(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Iterator[SpanRecordingContext]:
        """Record what takes as long as the block. What happens inside belongs to it."""
        recording = Recording(name, attributes, start_time)
        current = pushed()
        span = None if current is None else make_span(current, name, SpanKind.OTHER, {})
        token = None
        if current is not None and span is not None:
            token = set_acting(replace(current, parent_span_id=span.span_id))
        try:
            yield recording
        except BaseException as error:
            recording.record_exception(error)
            raise
        finally:
            if token is not None:
                reset_acting(token)
            recording.finish(end_time)
            if current is not None and span is not None:
                current.scope.recorder.add(from_core(recording.get_recorded_span(), span))

    def get_langchain_handler(self, tags: list[str] | None = None) -> Any | None:
        """A LangChain callback handler; None (and a warning) where the adapter is not installed.

        Args:
            tags: accepted for compatibility; agents are named by the graph's nodes.
        """
        if importlib.util.find_spec("lightspan_langgraph") is None:
            log.warning(
                "lightspan-langgraph is not installed: model calls of LangGraph nodes will have no "
                "agent's name, and agent_match nothing to match"
            )
            return None
        return importlib.import_module("lightspan_langgraph").LightspanCallback()

    get_langchain_callback_handler = get_langchain_handler


class OtelTracer(Tracer):
    """`Tracer` under the name of the original's for OpenTelemetry."""


class AgentOpsTracer(Tracer):
    """`Tracer` under the name of the original's default one; nothing of AgentOps is used.

    Args:
        agentops_managed: accepted; there is no AgentOps to manage.
        instrument_managed: accepted; clients are instrumented in the first block.
        daemon: accepted.
    """

    def __init__(
        self,
        *,
        agentops_managed: bool = True,
        instrument_managed: bool = True,
        daemon: bool = True,
    ) -> None:
        super().__init__()


class DummyTracer(Tracer):
    """Makes spans, and records them nowhere."""

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        return instant(name, attributes, timestamp, status)

    @contextmanager
    def operation_context(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Iterator[SpanRecordingContext]:
        recording = Recording(name, attributes, start_time)
        try:
            yield recording
        except Exception as error:
            recording.record_exception(error)
            raise
        finally:
            recording.finish(end_time)


class Recording:
    """A span that is not over."""

    def __init__(
        self, name: str, attributes: Attributes | None = None, start_time: float | None = None
    ) -> None:
        self._span = instant(name, attributes, start_time)
        self._is_over = False

    def record_exception(self, exception: BaseException) -> None:
        """It failed."""
        self.record_status("ERROR", str(exception))
        self.record_attributes(exception_attributes(exception))

    def record_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.attributes.update(attributes)

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """How it ends."""
        self._span.status = TraceStatus(status_code=status_code, description=description)

    def finish(self, end_time: float | None = None) -> None:
        """It is over."""
        self._span.end_time = end_time or time.time()
        self._is_over = True

    def get_recorded_span(self) -> SpanCoreFields:
        """What was recorded.

        Raises:
            ConfigError: it is not over.
        """
        if not self._is_over:
            raise ConfigError(f"the span {self._span.name!r} is not over: ask after its block")
        return self._span


def instant(
    name: str,
    attributes: Attributes | None = None,
    timestamp: float | None = None,
    status: TraceStatus | None = None,
) -> SpanCoreFields:
    """A span that takes no time."""
    now = time.time() if timestamp is None else timestamp
    return SpanCoreFields(
        name=name,
        attributes=dict(attributes or {}),
        start_time=now,
        end_time=now,
        status=status or TraceStatus(status_code="OK"),
    )
