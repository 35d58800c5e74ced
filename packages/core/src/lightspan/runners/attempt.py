"""Run one attempt: call the app in its context with a time limit, and report the result."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightspan.capture import misattributed_calls
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.errors import LightspanError, StoreError
from lightspan.runners.app import Inputs, attempt_llm
from lightspan.runners.gateway_probe import GatewayEndpoint
from lightspan.runners.outcome import STOPPED, AttemptResult, classify, result_of
from lightspan.runners.protocol import GATEWAY_VARIABLE, TOKEN_VARIABLE
from lightspan.runners.stack_location import coroutine_stack, describe_stack
from lightspan.schema import clock, semconv as c
from lightspan.schema.records import AttemptRef, AttemptStatus, Claim, Outcome
from lightspan.schema.resources import instructions_in, routing_of
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
    from lightspan.runners.runner import Runner

log = logging.getLogger(__name__)

_REPORT_BACKOFF_S: Final = (*RETRY_BACKOFF_S[:3], None)
"""Seconds to wait after each failed report; None after the last. There are few retries, because
another runner takes over the rollout when the lease expires. The gateway and the recording in
production retry for longer, because no other process repeats their writes."""


class AttemptRun:
    """One attempt that a runner executes."""

    def __init__(self, runner: Runner, claim: Claim) -> None:
        self.claim = claim
        self.ref = AttemptRef(claim.attempt.attempt_id, claim.attempt.epoch)
        self.task: asyncio.Task[None] | None = None
        self.deadline: float | None = None
        """Time by `clock.monotonic` at which the app's time limit ends; None for no limit."""
        self.ending: AttemptResult | None = None
        """Result of the attempt, even if it is not reported yet; None while the app runs."""
        self._runner = runner
        self._scope: AttemptContext | None = None
        self._is_stopping = False
        self._misattributed = misattributed_calls.count()
        self._root_span_id = new_span_id()
        self._start_ns = now_ns()

    @property
    def attempt_id(self) -> str:
        return self.ref.attempt_id

    async def run(self) -> None:
        """Run the app, store the spans of the attempt, and report its result."""
        wanted, own = self.claim.rollout.app, self._runner.config.app
        if wanted and own and wanted != own:
            # the run was resumed with another app; the attempt does not count as a try
            text = f"for the app {wanted}, not {own}"
            self._runner.leave_run(self.claim.rollout.run_id)
            await self.finish(STOPPED._replace(message=text))
            return
        try:
            ending = await self._prepare_and_execute()
        except asyncio.CancelledError:
            await asyncio.shield(self.finish(STOPPED))
            raise
        calls = [] if self._scope is None else self._scope.recorder.lost_calls
        if calls and ending.status is not AttemptStatus.LOST:  # the app caught the error
            text = f"the app went on without the answer to a model call {calls[0][2]}"
            ending = AttemptResult(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, text)
        if ending.outcome is Outcome.INFRASTRUCTURE and self._endpoint is not None:
            self._runner.await_gateway(self.claim.rollout.run_id, self._endpoint)
        await self.finish(ending)

    async def _prepare_and_execute(self) -> AttemptResult:
        try:
            self._scope, inputs = await self._prepare()
        except LightspanError as error:
            return AttemptResult(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, str(error))
        endpoint, run_id = self._endpoint, self.claim.rollout.run_id
        if endpoint is not None and not await self._runner.can_reach(run_id, endpoint):
            # The app would occupy its slot until the timeouts of its clients are over.
            text = f"the gateway {endpoint.url} of the training does not answer"
            return AttemptResult(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, text)
        return await self._execute(self._scope, inputs)

    @property
    def _endpoint(self) -> GatewayEndpoint | None:
        """The gateway of the attempt; None if there is none, or before the attempt is prepared."""
        scope = self._scope
        if scope is None or not scope.gateway_url:
            return None
        return GatewayEndpoint(scope.gateway_url, scope.call_token)

    def stop(self) -> None:
        """Cancel the attempt, and requeue its rollout.

        The attempt does not count as one of the rollout's tries.
        """
        if self.task is not None and self.ending is None and not self._is_stopping:
            self._is_stopping = True
            self.task.cancel()
            self._schedule_abandonment(STOPPED)

    def abort(self) -> None:
        """Stop the attempt, because it has ended in the store."""
        if self.ending is None:
            log.warning("attempt %s was cancelled or lost its lease: it ends", self.attempt_id)
            self.stop()

    def timed_out(self, why: str = "") -> AttemptResult:
        """Return the result of an attempt whose app ran past its time limit.

        Args:
            why: text to append to the message.
        """
        text = f"the app ran longer than {self.claim.rollout.timeout_s:g} s{why}"
        return AttemptResult(AttemptStatus.TIMEOUT, Outcome.TIMEOUT, text)

    def _schedule_abandonment(self, ending: AttemptResult) -> None:
        """Report `ending` after the grace period, if the cancelled app still runs then."""
        asyncio.get_running_loop().call_later(self._runner.config.grace_s, self._abandon, ending)

    def _abandon(self, ending: AttemptResult) -> None:
        if self.task is None or self.task.done() or self.ending is not None:
            return
        where = describe_stack(coroutine_stack(self.task.get_coro()))
        text = f"{ending.message} and went on when it was cancelled: {where}"
        log.warning("attempt %s: %s", self.attempt_id, text)
        self._runner.abandon(self, ending._replace(message=text))

    async def _prepare(self) -> tuple[AttemptContext, Inputs]:
        rollout, attempt = self.claim.rollout, self.claim.attempt
        resources = await self._runner.resources_of(rollout.resources_id)
        routing = routing_of(resources)
        gateway = routing.gateway_url
        scope = AttemptContext(
            rollout_id=rollout.rollout_id,
            attempt_id=attempt.attempt_id,
            mode=rollout.mode,
            gateway_url=(gateway and self._runner.config.relay) or gateway or None,
            call_token=attempt.call_token,
            routing=routing,
            instructions=instructions_in(resources),
            root_span_id=self._root_span_id,
            follows_urls=self._runner.app.follows_urls,
        )
        return scope, Inputs(rollout, resources, attempt_llm(scope))

    async def _execute(self, scope: AttemptContext, inputs: Inputs) -> AttemptResult:
        app = self._runner.app
        if self._runner.config.environment:
            os.environ[TOKEN_VARIABLE] = scope.call_token
            os.environ[GATEWAY_VARIABLE] = scope.gateway_url or ""
        timeout_s, timer = self.claim.rollout.timeout_s, None
        if timeout_s is not None:
            self.deadline = clock.monotonic() + timeout_s
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._schedule_abandonment, self.timed_out())
        try:
            async with asyncio.timeout(timeout_s) as limit:
                value = await (self._call_async if app.is_async else self._call_sync)(scope, inputs)
        except BaseException as error:  # SystemExit too, and what pytest.fail raises
            is_cancelled = self._is_stopping or self._runner.is_leaving  # else by the app itself
            if isinstance(error, asyncio.CancelledError) and is_cancelled:
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                return self.timed_out()
            return self._failed(scope, error)
        finally:
            if timer is not None:
                timer.cancel()
        if isinstance(value, _Raised):
            return self._failed(scope, value.error)
        return result_of(value, self._runner.config.app)

    def _failed(self, scope: AttemptContext, error: BaseException) -> AttemptResult:
        span = self._span(
            scope,
            name="lightspan.exception",
            kind=SpanKind.EXCEPTION,
            span_id=new_span_id(),
            parent_id=self._root_span_id,
            start_ns=now_ns(),
            status=SpanStatus.ERROR,
            status_message=text_of(error),
            attributes=clean_attributes(exception_attributes(error)),
        )
        calls = [each for each in scope.recorder.spans if each.kind is SpanKind.LLM]
        paths = [x.attributes.get(c.AGENT_PATH) for x in calls if x.status is SpanStatus.ERROR]
        scope.recorder.add(span)
        return classify(error, scope.gateway_url, str(paths[-1] if paths else ""))

    async def _call_async(self, scope: AttemptContext, inputs: Inputs) -> Any:
        with open_scope(scope):
            return await self._runner.app.call(inputs)

    async def _call_sync(self, scope: AttemptContext, inputs: Inputs) -> Any:
        finished = threading.Event()

        def work() -> Any:
            try:
                with open_scope(scope):
                    return self._runner.app.call(inputs)
            except BaseException as error:
                return _Raised(error)
            finally:
                finished.set()

        # Shielded, because a thread cannot be cancelled: the app still runs after a cancellation.
        loop, context = asyncio.get_running_loop(), copy_context()
        future = loop.run_in_executor(self._runner.pool, context.run, work)
        try:
            value = await asyncio.shield(future)
        except BaseException:
            is_stuck = not finished.is_set()
            self._runner.stuck += is_stuck
            future.add_done_callback(partial(self._release, was_stuck=is_stuck))
            raise
        if not inspect.isawaitable(value):
            return value
        with open_scope(scope):  # on the shared loop, because the app's clients are bound to a loop
            return await value

    def _release(self, future: asyncio.Future[Any], *, was_stuck: bool) -> None:
        """Clean up after a sync app that returns only after its attempt was cancelled or timed out.

        Args:
            future: the app's call.
            was_stuck: whether the app was counted as stuck.
        """
        self._runner.stuck -= was_stuck
        if not future.cancelled() and future.exception() is None:
            value = future.result()
            if inspect.iscoroutine(value):
                value.close()  # it will not be awaited

    async def finish(self, ending: AttemptResult, store: Store | None = None) -> None:
        """Store the attempt's spans and report its result. Do nothing if this has begun already.

        Args:
            ending: result of the attempt.
            store: store that is open in the calling thread; None for the runner's store.
        """
        if self.ending is not None:
            return
        self.ending = ending
        store = store or self._runner.store
        scope = self._scope
        spans, capture_errors = ([], []) if scope is None else self._recorded(scope, ending)
        try:
            if images := scope.recorder.images_of(spans) if scope else []:
                await store.add_images(self.ref, images)
        except LightspanError as error:
            capture_errors.append(f"images could not be stored: {error}")
        report = self.claim.attempt.report(**ending._asdict(), capture_errors=capture_errors)
        for pause in _REPORT_BACKOFF_S:
            try:
                ok = [await store.finish(report, spans)] if spans else await store.report([report])
                self._runner.returned += all(ok) and not ending.counts
                self._runner.finished += all(ok) and ending.status is not AttemptStatus.LOST
                return
            except StoreError as error:
                log.warning("attempt %s cannot be reported: %s", self.attempt_id, error)
            if pause is not None:
                await asyncio.sleep(pause)
        self._runner.returned += not ending.counts  # when the lease expires

    def _recorded(self, scope: AttemptContext, end: AttemptResult) -> tuple[list[Span], list[str]]:
        """End the recording of the attempt; return its spans and its capture errors.

        A root span is added to the spans.

        Args:
            scope: context of the attempt.
            end: result of the attempt.
        """
        recorder = scope.recorder
        recorder.is_over = True
        recorder.cancel_pending()
        missing = misattributed_calls.missing_call_reason(recorder, self._misattributed)
        if missing is not None:
            recorder.add_capture_error(missing)
        attributes: Attributes = {c.ROLLOUT_ID: scope.rollout_id, c.ATTEMPT_ID: scope.attempt_id}
        is_ok = end.status is AttemptStatus.SUCCEEDED
        root = self._span(
            scope,
            name="attempt",
            kind=SpanKind.CHAIN,
            span_id=self._root_span_id,
            start_ns=self._start_ns,
            status=SpanStatus.OK if is_ok else SpanStatus.ERROR,
            status_message=end.message,
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
    """Holds the exception of a sync app, so that it can be the result of a future.

    A future cannot raise every exception: `StopIteration` is not allowed.
    """

    error: BaseException
