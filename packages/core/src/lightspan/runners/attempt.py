"""One attempt in the hands of a runner: the app is called in its scope, limited, and reported."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from lightspan.capture import misattributed_calls
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.errors import LightspanError, StoreError
from lightspan.runners.app import App, Inputs, attempt_llm
from lightspan.runners.command.environment import GATEWAY_VARIABLE, TOKEN_VARIABLE
from lightspan.runners.gateway_probe import GatewayEndpoint
from lightspan.runners.outcome import STOPPED, AttemptResult, classify, returned
from lightspan.runners.stack_location import in_words, of_coroutine
from lightspan.schema import clock, semconv as c
from lightspan.schema.provenance import uncaptured_attributes
from lightspan.schema.records import AttemptRef, AttemptStatus, Claim, Outcome, Report
from lightspan.schema.resources import NamedResources, instructions_in, routing_of
from lightspan.schema.semconv import exception_attributes
from lightspan.schema.spans import (
    Attributes,
    Span,
    SpanKind,
    SpanStatus,
    clean_attributes,
    new_span_id,
    now_ns,
    text_of,
)
from lightspan.stores.protocol import RETRY_BACKOFF_S, Store

if TYPE_CHECKING:
    from lightspan.runners.runner import RunnerConfig

log = logging.getLogger(__name__)

_REPORT_PAUSES_S: Final = (*RETRY_BACKOFF_S[:3], None)
"""Before each further try of a report that the store did not take. No more than these: when the
lease runs out another runner takes over, as if this one had died. The journal and the gateway,
whose writes nobody repeats for them, try for longer."""


class RunnerContext(Protocol):
    """What an attempt needs of its runner."""

    @property
    def store(self) -> Store: ...
    @property
    def app(self) -> App: ...
    @property
    def config(self) -> RunnerConfig: ...
    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for sync apps, one per slot."""
        ...

    @property
    def is_leaving(self) -> bool:
        """Whether it ends, and cancels what it has under way."""
        ...

    async def resources_of(self, resources_id: str) -> NamedResources:
        """Raises `StoreError` if they cannot be had."""
        ...

    def leave_run(self, run_id: str) -> None:
        """Claim nothing more of this run: it asks for another app."""
        ...

    def doubt(self, way: GatewayEndpoint) -> None:
        """An attempt was lost for want of its gateway."""
        ...

    def abandon(self, attempt: AttemptRun, ending: AttemptResult) -> None:
        """Report an attempt whose app does not end, and wait for it no longer."""
        ...

    def count_stuck(self, change: int) -> None:
        """So many more apps hold their thread, or task, past their end."""
        ...


class AttemptRun:
    """One attempt in the hands of a runner."""

    def __init__(self, host: RunnerContext, claim: Claim) -> None:
        self.claim = claim
        self.ref = AttemptRef(claim.attempt.attempt_id, claim.attempt.epoch)
        self.task: asyncio.Task[None] | None = None
        self.deadline: float | None = None
        """When the app has to have ended, by `clock.monotonic`; None while there is no limit."""
        self.ending: AttemptResult | None = None
        """How the app has ended; what is left is to report."""
        self._host = host
        self._store = host.store
        self._scope: AttemptContext | None = None
        self._stopping = False
        self._strays = misattributed_calls.count()
        self._root = new_span_id()
        self._started = now_ns()

    @property
    def attempt_id(self) -> str:
        return self.ref.attempt_id

    async def run(self) -> None:
        """Run the app, keep its spans, report."""
        if not self._is_ours():
            # its run was resumed with another app; no try is used up
            text = f"for the app {self.claim.rollout.app}, not {self._host.config.app}"
            self._host.leave_run(self.claim.rollout.run_id)
            await self.finish(STOPPED._replace(message=text))
            return
        try:
            ending = await self._prepared_and_executed()
        except asyncio.CancelledError:
            await asyncio.shield(self.finish(STOPPED))
            raise
        if ending.outcome is Outcome.INFRASTRUCTURE and self._scope and self._scope.gateway_url:
            relayed = bool(self._host.config.relay)
            token = self._scope.call_token if relayed else ""
            self._host.doubt(GatewayEndpoint(self._scope.gateway_url, token))
        await self.finish(ending)

    async def _prepared_and_executed(self) -> AttemptResult:
        try:
            self._scope, inputs = await self._prepare()
        except LightspanError as error:
            return AttemptResult(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, str(error))
        return await self._execute(self._scope, inputs)

    @property
    def _is_cancelled(self) -> bool:
        """Whether we cancel it: an app may cancel itself, or raise CancelledError."""
        return self._stopping or self._host.is_leaving

    def stop(self) -> None:
        """Cancel it: it is lost, and its rollout queued again without using up a try."""
        if self.task is not None and self.ending is None and not self._stopping:
            self._stopping = True
            self.task.cancel()
            self._expect_end(STOPPED)

    def abort(self) -> None:
        """Stop it, because its lease is another runner's."""
        if self.ending is None:
            log.warning("attempt %s lost its lease and is stopped", self.ref.attempt_id)
            self.stop()

    def timed_out(self, why: str = "") -> AttemptResult:
        """The ending of an app that has run out of time."""
        text = f"the app ran longer than {self.claim.rollout.timeout_s:g} s{why}"
        return AttemptResult(AttemptStatus.TIMEOUT, Outcome.TIMEOUT, text)

    def _expect_end(self, ending: AttemptResult) -> None:
        """The app is being cancelled: report it so if it goes on all the same."""
        grace_s = self._host.config.grace_s
        asyncio.get_running_loop().call_later(grace_s, self._give_up, ending)

    def _give_up(self, ending: AttemptResult) -> None:
        if self.task is None or self.task.done() or self.ending is not None:
            return
        where = in_words(of_coroutine(self.task.get_coro()))
        text = f"{ending.message} and went on when it was cancelled: {where}"
        log.warning("attempt %s: %s", self.ref.attempt_id, text)
        self._host.abandon(self, ending._replace(message=text))

    def _is_ours(self) -> bool:
        wanted, mine = self.claim.rollout.app, self._host.config.app
        return not wanted or not mine or wanted == mine

    async def _prepare(self) -> tuple[AttemptContext, Inputs]:
        rollout, attempt = self.claim.rollout, self.claim.attempt
        resources = await self._host.resources_of(rollout.resources_id)
        routing = routing_of(resources)
        gateway = routing.gateway_url
        scope = AttemptContext(
            rollout_id=rollout.rollout_id,
            attempt_id=attempt.attempt_id,
            mode=rollout.mode,
            gateway_url=(gateway and self._host.config.relay) or gateway or None,
            call_token=attempt.call_token,
            routing=routing,
            instructions=instructions_in(resources),
            root_span_id=self._root,
            follows_urls=self._host.app.follows_urls,
        )
        return scope, Inputs(rollout, resources, attempt_llm(scope))

    async def _execute(self, scope: AttemptContext, inputs: Inputs) -> AttemptResult:
        app = self._host.app
        if self._host.config.environment:
            os.environ[TOKEN_VARIABLE] = scope.call_token
            os.environ[GATEWAY_VARIABLE] = scope.gateway_url or ""
        timeout_s, timer = self.claim.rollout.timeout_s, None
        if timeout_s is not None:
            self.deadline = clock.monotonic() + timeout_s
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._expect_end, self.timed_out())
        try:
            async with asyncio.timeout(timeout_s) as limit:
                value = await (self._call_async if app.is_async else self._call_sync)(scope, inputs)
        except BaseException as error:  # SystemExit, and what is no Exception, such as pytest.fail
            if isinstance(error, asyncio.CancelledError) and self._is_cancelled:
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                return self.timed_out()
            return self._failed(scope, error)
        finally:
            if timer is not None:
                timer.cancel()
        if isinstance(value, _Raised):
            return self._failed(scope, value.error)
        return returned(value)

    def _failed(self, scope: AttemptContext, error: BaseException) -> AttemptResult:
        span = self._span(
            scope,
            name="lightspan.exception",
            kind=SpanKind.EXCEPTION,
            span_id=new_span_id(),
            parent_id=self._root,
            start_ns=now_ns(),
            status=SpanStatus.ERROR,
            status_message=text_of(error),
            attributes=clean_attributes(exception_attributes(error)),
        )
        scope.recorder.add(span)
        return classify(error, scope.gateway_url)

    async def _call_async(self, scope: AttemptContext, inputs: Inputs) -> Any:
        with open_scope(scope):
            return await self._host.app.call(inputs)

    async def _call_sync(self, scope: AttemptContext, inputs: Inputs) -> Any:
        finished = threading.Event()

        def work() -> Any:
            try:
                with open_scope(scope):
                    return self._host.app.call(inputs)
            except BaseException as error:
                return _Raised(error)
            finally:
                finished.set()

        # Shielded, because a thread cannot be cancelled: the app in it runs on whatever happens
        # here.
        loop, context = asyncio.get_running_loop(), copy_context()
        future = loop.run_in_executor(self._host.pool, context.run, work)
        try:
            value = await asyncio.shield(future)
        except BaseException:
            is_stuck = not finished.is_set()
            self._host.count_stuck(is_stuck)
            future.add_done_callback(partial(self._left_over, was_stuck=is_stuck))
            raise
        if not inspect.isawaitable(value):
            return value
        with open_scope(scope):  # on the one loop: clients that an app keeps are bound to theirs
            return await value

    def _left_over(self, future: asyncio.Future[Any], *, was_stuck: bool) -> None:
        """A sync app has ended after its outcome was reported: it ran too long, or was stopped."""
        self._host.count_stuck(-was_stuck)
        if not future.cancelled() and future.exception() is None:
            value = future.result()
            if inspect.iscoroutine(value):
                value.close()  # nobody will await it

    async def finish(self, ending: AttemptResult, store: Store | None = None) -> None:
        """Keep the spans and report; nothing if that was begun already.

        Args:
            ending: how the app ended.
            store: another one than the runner's, of the thread that calls.
        """
        if self.ending is not None:
            return
        self.ending = ending
        store = store or self._store
        scope = self._scope
        spans, capture_errors = ([], []) if scope is None else self._recorded(scope, ending)
        report = self.claim.attempt.report(**ending._asdict(), capture_errors=capture_errors)
        for pause in _REPORT_PAUSES_S:
            try:
                await (store.finish(report, spans) if spans else store.report([report]))
                return
            except StoreError as error:
                log.warning("attempt %s cannot be reported: %s", self.ref.attempt_id, error)
                if spans:  # it may be for these, as where they are too large
                    report, spans = await self._without_spans(report, spans, store), []
                if pause is not None:
                    await asyncio.sleep(pause)

    async def _without_spans(self, report: Report, spans: list[Span], store: Store) -> Report:
        """The report on its own: its spans are kept before, or it says that they are not."""
        try:
            await store.add_spans(self.ref, spans)
        except LightspanError as error:
            capture_errors = [*report.capture_errors, f"spans could not be stored: {error}"]
            return msgspec.structs.replace(report, capture_errors=capture_errors)
        return report

    def _recorded(
        self, scope: AttemptContext, ending: AttemptResult
    ) -> tuple[list[Span], list[str]]:
        """The spans that are to be kept, and the capture errors."""
        recorder = scope.recorder
        recorder.is_over = True
        recorder.cancel_pending()
        lost = misattributed_calls.missing_call_reason(recorder, self._strays)
        if lost is not None:
            recorder.add_capture_error(lost)
        attributes: Attributes = {c.ROLLOUT_ID: scope.rollout_id, c.ATTEMPT_ID: scope.attempt_id}
        attributes |= uncaptured_attributes(recorder.uncaptured)
        failed = ending.status is not AttemptStatus.SUCCEEDED
        root = self._span(
            scope,
            name="attempt",
            kind=SpanKind.CHAIN,
            span_id=self._root,
            start_ns=self._started,
            status=SpanStatus.ERROR if failed else SpanStatus.OK,
            status_message=ending.message,
            attributes=attributes,
        )
        return [*recorder.drain(), root], recorder.capture_errors()

    def _span(self, scope: AttemptContext, **fields: Any) -> Span:
        return Span(
            trace_id=scope.trace_id,
            rollout_id=scope.rollout_id,
            attempt_id=scope.attempt_id,
            end_ns=now_ns(),
            **fields,
        )


class _Raised(NamedTuple):
    """What a sync app raised, as a value: a future takes no StopIteration, and would never end."""

    error: BaseException
