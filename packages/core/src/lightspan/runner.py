"""Runner: claim an attempt, run the app in its scope, report.

One runner is one asyncio loop. Async apps share the loop; sync apps get one attempt per worker
thread, and what one returns to be awaited is awaited on the loop, which it must not block. A runner
never raises into the app and never lets an app's failure end it: failures are outcomes (design
law 4), classified at one place (`classify`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from lightspan import conventions as c
from lightspan import threads, wire
from lightspan.app import App, Inputs
from lightspan.command import GATEWAY_VARIABLE, TOKEN_VARIABLE, ProgramError
from lightspan.emit import exception_attributes, text_of
from lightspan.errors import LightspanError, RewardError, StoreError
from lightspan.llm import LLM
from lightspan.records import (
    AttemptRef,
    AttemptStatus,
    Claim,
    Outcome,
    Report,
    Reward,
    new_id,
    parse_reward,
)
from lightspan.resources import NamedResources, routing_of
from lightspan.scope import Scope, open_scope
from lightspan.spans import Span, SpanKind, SpanStatus, clean_attributes, new_span_id, now_ns
from lightspan.store import Store

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S: Final = 1.0
PLACEHOLDER_KEY: Final = "lightspan-placeholder"
"""What an app without any key finds, so that its client can be built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How a runner works."""

    slots: int = 8
    """Attempts at once."""
    run_id: str | None = None
    """Claim only this run's rollouts."""
    app: str = ""
    """`module:name` of the app: a rollout that is for another one is given back."""
    lease_s: float = 30.0
    """A runner that is silent this long has lost its attempts."""
    poll_s: float = 0.02
    """Shortest pause between two looks at an empty queue. It grows to 1 % of the time for which
    there was nothing, so that a runner is never late by more than that; 1 s at most."""
    name: str = field(default_factory=lambda: new_id("runner"))
    environment: bool = False
    """With one slot: put the call token and the gateway's address into the environment
    (`TOKEN_VARIABLE`, `GATEWAY_VARIABLE`), for programs that the app starts."""


class Runner:
    """Runs one app's attempts until stopped.

    Args:
        store: an open store.
        app: the app.
        config: see `RunnerConfig`.
    """

    def __init__(self, store: Store, app: App, config: RunnerConfig | None = None) -> None:
        self._store = store
        self._app = app
        self._config = config or RunnerConfig()
        self._resources: dict[str, NamedResources] = {}
        self._running: dict[str, _Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        self._stuck = 0
        self._runs: Sequence[str | None] = [self._config.run_id]
        self.claimed = 0
        """Attempts so far, those that are over included."""
        self._pool = ThreadPoolExecutor(self._config.slots, thread_name_prefix="lightspan-app")

    async def run(self) -> None:
        """Work until `stop` is called, or until a sync app is stuck past its time limit (threads
        cannot be ended: the process has to be replaced)."""
        os.environ.setdefault("OPENAI_API_KEY", PLACEHOLDER_KEY)
        threads.carry()
        beat = asyncio.create_task(self._heartbeats())
        try:
            async with self._app.opened():
                await self._claim_loop()
                if self._tasks:
                    await asyncio.wait(self._tasks)
        finally:
            for task in self._tasks:  # only if we are cancelled ourselves
                task.cancel()
            beat.cancel()
            await asyncio.gather(beat, *self._tasks, return_exceptions=True)
            await wire.aclose()
            self._pool.shutdown(wait=not self._stuck, cancel_futures=True)

    def work_for(self, run_ids: Sequence[str]) -> None:
        """Claim the rollouts of these runs only, from now on; none: claim nothing."""
        self._runs = list(run_ids)
        self._freed.set()

    def _leave(self, run_id: str) -> None:
        log.warning("run %s asks for another app than this runner has", run_id)
        self._runs = [one for one in self._runs if one not in (run_id, None)]

    @property
    def running(self) -> int:
        """Attempts under way."""
        return len(self._tasks)

    def stop(self) -> None:
        """Claim nothing more; `run` returns when the attempts under way have ended."""
        self._stopping.set()
        self._freed.set()

    def abort(self) -> None:
        """Stop, and cancel the attempts under way (they are lost, and run again)."""
        self.stop()
        for task in list(self._tasks):
            task.cancel()

    @property
    def stuck(self) -> bool:
        """Whether a sync app ran past its limit and still holds its thread."""
        return self._stuck > 0

    async def run_once(self, claim: Claim) -> None:
        """Run one claimed attempt and report it."""
        await _Attempt(self, claim).run()

    async def _claim_loop(self) -> None:
        last = time.monotonic()
        while not self._stopping.is_set() and not self.stuck:
            self._freed.clear()
            free = self._config.slots - len(self._tasks)
            claims = await self._claim(free) if free else []
            for claim in claims:
                self._launch(claim)
            if claims:
                last = time.monotonic()
            elif free:
                await self._pause(_pause_after(time.monotonic() - last, self._config.poll_s))
            else:
                await self._freed.wait()

    async def _claim(self, free: int) -> list[Claim]:
        config = self._config
        claims: list[Claim] = []
        try:
            for run_id in self._runs:
                left = free - len(claims)
                claims += await self._store.claim(config.name, left, config.lease_s, run_id)
        except StoreError as error:
            log.warning("the runner cannot claim: %s", error)
        return claims

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._freed.wait(), seconds)
        except TimeoutError:
            return

    def _launch(self, claim: Claim) -> None:
        attempt = _Attempt(self, claim)
        task = asyncio.create_task(attempt.run(), name=claim.attempt.attempt_id)
        attempt.task = task
        self._running[claim.attempt.attempt_id] = attempt
        self._tasks.add(task)
        self.claimed += 1
        task.add_done_callback(lambda done: self._ended(claim.attempt.attempt_id, done))

    def _ended(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running.pop(attempt_id, None)
        self._freed.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("attempt %s: the runner failed", attempt_id, exc_info=task.exception())

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            refs = [attempt.ref for attempt in self._running.values()]
            if not refs:
                continue
            try:
                lost = await self._store.heartbeat(refs, self._config.lease_s)
            except StoreError as error:
                log.warning("the runner cannot extend its leases: %s", error)
                continue
            for ref in lost:
                self._lose(ref.attempt_id)

    def _lose(self, attempt_id: str) -> None:
        attempt = self._running.get(attempt_id)
        if attempt is not None and attempt.task is not None and not attempt.finishing:
            log.warning("attempt %s lost its lease and is stopped", attempt_id)
            attempt.task.cancel()

    async def _resources_of(self, resources_id: str) -> NamedResources:
        if not resources_id:
            return {}
        if resources_id not in self._resources:
            self._resources[resources_id] = await self._store.get_resources(resources_id)
        return self._resources[resources_id]


def _pause_after(idle_s: float, shortest_s: float) -> float:
    """Seconds until the next look at a queue that has been empty for `idle_s`."""
    return max(shortest_s, min(_LONGEST_PAUSE_S, idle_s / 100))


class _Attempt:
    """One attempt in the hands of a runner."""

    def __init__(self, runner: Runner, claim: Claim) -> None:
        self.claim = claim
        self.ref = AttemptRef(claim.attempt.attempt_id, claim.attempt.epoch)
        self.task: asyncio.Task[None] | None = None
        self.finishing = False
        """The app has ended; what is left is to report."""
        self._runner = runner
        self._store = runner._store
        self._root = new_span_id()
        self._started = now_ns()

    async def run(self) -> None:
        """Run the app, keep its spans, report."""
        if not self._is_ours():
            # of a run that asks for another app since it was resumed; no try is used up
            text = f"for the app {self.claim.rollout.app}, not {self._runner._config.app}"
            ending = _ending(AttemptStatus.LOST, Outcome.CANCELLED, text, counts=False)
            self._runner._leave(self.claim.rollout.run_id)
            await self._report(ending, [])
            return
        try:
            scope, inputs = await self._prepare()
        except LightspanError as error:
            await self._report(_ending(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, str(error)), [])
            return
        try:
            ending = await self._execute(scope, inputs)
        except asyncio.CancelledError:
            # lost lease, or the runner is going: the rollout is queued again, no try used up
            ending = _ending(AttemptStatus.LOST, Outcome.CANCELLED, "stopped", counts=False)
            await asyncio.shield(self._finish(scope, ending))
            raise
        await self._finish(scope, ending)

    def _is_ours(self) -> bool:
        wanted, mine = self.claim.rollout.app, self._runner._config.app
        return not wanted or not mine or wanted == mine

    async def _prepare(self) -> tuple[Scope, Inputs]:
        rollout, attempt = self.claim.rollout, self.claim.attempt
        resources = await self._runner._resources_of(rollout.resources_id)
        routing = routing_of(resources)
        scope = Scope(
            rollout_id=rollout.rollout_id,
            attempt_id=attempt.attempt_id,
            mode=rollout.mode,
            gateway_url=routing.gateway_url or None,
            call_token=attempt.call_token,
            routing=routing,
            root_span_id=self._root,
        )
        return scope, Inputs(rollout, resources, _llm(scope))

    async def _execute(self, scope: Scope, inputs: Inputs) -> _Ending:
        timeout = self.claim.rollout.timeout_s
        app = self._runner._app
        if self._runner._config.environment:
            os.environ[TOKEN_VARIABLE] = scope.call_token
            os.environ[GATEWAY_VARIABLE] = scope.gateway_url or ""
        try:
            async with asyncio.timeout(timeout) as limit:
                value = await (self._call_async if app.is_async else self._call_sync)(scope, inputs)
        except asyncio.CancelledError as error:
            if _being_cancelled():
                raise
            return self._failed(scope, error)  # the app cancelled itself
        except GeneratorExit:
            raise
        except BaseException as error:  # SystemExit, and what is no Exception, such as pytest.fail
            if isinstance(error, TimeoutError) and limit.expired():
                text = f"the app ran longer than {timeout:g} s"
                return _ending(AttemptStatus.TIMEOUT, Outcome.TIMEOUT, text)
            return self._failed(scope, error)
        try:
            reward = parse_reward(value)
        except RewardError as error:
            return _ending(AttemptStatus.FAILED, Outcome.BAD_REWARD, f"the app returned: {error}")
        return _ending(AttemptStatus.SUCCEEDED, Outcome.OK, "", reward)

    def _failed(self, scope: Scope, error: BaseException) -> _Ending:
        scope.recorder.add(self._exception_span(scope, error))
        return classify(error, scope.gateway_url)

    async def _call_async(self, scope: Scope, inputs: Inputs) -> Any:
        with open_scope(scope):
            return await self._runner._app.call(inputs)

    async def _call_sync(self, scope: Scope, inputs: Inputs) -> Any:
        finished = threading.Event()

        def work() -> Any:
            try:
                with open_scope(scope):
                    return self._runner._app.call(inputs)
            finally:
                finished.set()

        loop, context = asyncio.get_running_loop(), copy_context()
        future = loop.run_in_executor(self._runner._pool, context.run, work)
        try:
            value = await asyncio.shield(future)
        except BaseException:
            is_stuck = not finished.is_set()
            self._runner._stuck += is_stuck
            future.add_done_callback(partial(self._left_over, was_stuck=is_stuck))
            raise
        if not inspect.isawaitable(value):
            return value
        _adopt(context)
        with open_scope(scope):  # on the one loop: clients that an app keeps are bound to theirs
            return await value

    def _left_over(self, future: asyncio.Future[Any], *, was_stuck: bool) -> None:
        """A sync app has ended whose outcome was reported already."""
        self._runner._stuck -= was_stuck
        if not future.cancelled() and future.exception() is None:
            value = future.result()
            if inspect.iscoroutine(value):
                value.close()  # nobody will await it

    async def _finish(self, scope: Scope, ending: _Ending) -> None:
        self.finishing = True
        scope.recorder.give_up()
        spans = [*scope.recorder.drain(), self._root_span(scope, ending)]
        damage = scope.recorder.damages()
        try:
            await self._store.add_spans(self.ref, spans)
        except LightspanError as error:
            damage.append(f"spans could not be stored: {error}")
        await self._report(ending, damage)

    async def _report(self, ending: _Ending, damage: list[str]) -> None:
        report = Report(
            attempt_id=self.ref.attempt_id,
            epoch=self.ref.epoch,
            status=ending.status,
            outcome=ending.outcome,
            reward=ending.reward,
            message=ending.message,
            damage=damage,
            counts=ending.counts,
        )
        for pause in (0.1, 0.5, 2.0, None):
            try:
                await self._store.report([report])
                return
            except StoreError as error:
                log.warning("attempt %s cannot be reported: %s", self.ref.attempt_id, error)
                if pause is None:
                    return  # the lease will run out, and another runner takes over
                await asyncio.sleep(pause)

    def _root_span(self, scope: Scope, ending: _Ending) -> Span:
        failed = ending.status is not AttemptStatus.SUCCEEDED
        return Span(
            span_id=self._root,
            trace_id=scope.trace_id,
            name="attempt",
            kind=SpanKind.CHAIN,
            rollout_id=scope.rollout_id,
            attempt_id=scope.attempt_id,
            start_ns=self._started,
            end_ns=now_ns(),
            status=SpanStatus.ERROR if failed else SpanStatus.OK,
            status_message=ending.message,
            attributes={c.ROLLOUT_ID: scope.rollout_id, c.ATTEMPT_ID: scope.attempt_id},
        )

    def _exception_span(self, scope: Scope, error: BaseException) -> Span:
        return Span(
            span_id=new_span_id(),
            trace_id=scope.trace_id,
            parent_id=self._root,
            name="lightspan.exception",
            kind=SpanKind.EXCEPTION,
            rollout_id=scope.rollout_id,
            attempt_id=scope.attempt_id,
            start_ns=now_ns(),
            end_ns=now_ns(),
            status=SpanStatus.ERROR,
            status_message=text_of(error),
            attributes=clean_attributes(exception_attributes(error)),
        )


def _being_cancelled() -> bool:
    """Whether somebody outside cancels the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _adopt(context: Context) -> None:
    """Set the variables that were set in the context here too."""
    for variable, value in context.items():
        if variable.get(_ABSENT) is not value:
            variable.set(value)


_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class _Ending:
    status: AttemptStatus
    outcome: Outcome
    message: str
    reward: Reward | None
    counts: bool


def _ending(
    status: AttemptStatus,
    outcome: Outcome,
    message: str,
    reward: Reward | None = None,
    *,
    counts: bool = True,
) -> _Ending:
    return _Ending(status, outcome, message, reward, counts)


_STATUS_OF: Final = {
    Outcome.TIMEOUT: AttemptStatus.TIMEOUT,
    Outcome.INFRASTRUCTURE: AttemptStatus.LOST,
}


def classify(error: BaseException, gateway_url: str | None) -> _Ending:
    """What an exception of the app means for the attempt (design law 4)."""
    if isinstance(error, ProgramError):
        status = _STATUS_OF.get(error.outcome, AttemptStatus.FAILED)
        return _ending(status, error.outcome, str(error))
    message = f"{type(error).__name__}: {text_of(error)}"
    for cause in _causes(error):
        if getattr(cause, "code", None) == "context_length_exceeded":
            return _ending(AttemptStatus.FAILED, Outcome.CONTEXT_OVERFLOW, message)
        if _gateway_unreachable(cause, gateway_url):
            return _ending(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, message)
    return _ending(AttemptStatus.FAILED, Outcome.APP_ERROR, message)


def _causes(error: BaseException) -> list[BaseException]:
    """The exception, what it was raised from, and what a group holds."""
    found: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue:
        current = queue.pop()
        if current is None or current in found:
            continue
        found.append(current)
        queue += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            queue += current.exceptions
    return found


def _gateway_unreachable(error: BaseException, gateway_url: str | None) -> bool:
    """A connection error, or a 5xx, of our own gateway is nobody's fault in the app."""
    try:
        url = str(error.request.url)  # type: ignore[attr-defined]
    except Exception:  # most exceptions have none, and httpx raises where it knows none
        return False
    if gateway_url is None or not url.startswith(f"{gateway_url}/"):
        return False
    status = getattr(error, "status_code", None)
    return status is None or status >= 500


def _llm(scope: Scope) -> LLM | None:
    """The endpoint that an app may ask for as `llm`: the gateway, opened by the call token."""
    if scope.gateway_url is None:
        return None
    policies = [rule.target.policy for rule in scope.routing.rules if rule.target.selected]
    name = policies[0] if policies else "policy"
    url, token = f"{scope.gateway_url}/v1", _Hidden(scope.call_token)
    return AttemptLLM(base_url=url, model=name, token=token)


class _Hidden:
    """A text that no repr, log line, span or JSON shows."""

    __slots__ = ("value",)

    def __init__(self, value: str) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "<hidden>"


class AttemptLLM(LLM, frozen=True, kw_only=True, tag="attempt-llm"):
    """The gateway as one attempt may use it; it lives in memory only."""

    token: _Hidden

    def api_key(self) -> str:
        """The attempt's call token."""
        return self.token.value
