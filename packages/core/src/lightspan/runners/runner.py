"""Runner: claim an attempt, run the app in its scope, report.

One runner is one asyncio loop. Async apps share the loop; sync apps get one attempt per worker
thread, and what one returns to be awaited is awaited on the loop, which it must not block. A runner
never raises into the app and never lets an app's failure end it: failures are outcomes (`outcome`).

An app that goes on though it was cancelled is reported and left to itself, and the runner ends when
its neighbours have (`Runner.stuck`). One that blocks the loop blocks all that is here: who notices
is a `Guard`, in a process that can be replaced.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from lightspan.capture import threads, wire
from lightspan.capture.entry import open_scope
from lightspan.capture.scope import Scope
from lightspan.errors import LightspanError, StoreError
from lightspan.runners.app import App, Inputs, attempt_llm
from lightspan.runners.command.environment import GATEWAY_VARIABLE, TOKEN_VARIABLE
from lightspan.runners.outcome import STOPPED, Ending, classify, returned
from lightspan.runners.whereabouts import in_words, of_coroutine
from lightspan.schema import conventions as c
from lightspan.schema.conventions import exception_attributes
from lightspan.schema.records import AttemptRef, AttemptStatus, Claim, Outcome, new_id
from lightspan.schema.resources import NamedResources, routing_of
from lightspan.schema.spans import (
    Span,
    SpanKind,
    SpanStatus,
    clean_attributes,
    new_span_id,
    now_ns,
    text_of,
)
from lightspan.stores.event_loop import within
from lightspan.stores.protocol import PAUSES_S, Store

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S: Final = 1.0
_REPORT_PAUSES_S: Final = (*PAUSES_S[:3], None)
"""Before each further try of a report that the store did not take. No more than these: when the
lease runs out another runner takes over, as if this one had died. The journal and the gateway,
whose writes nobody repeats for them, try for longer."""
BEATS_PER_LEASE: Final = 6
"""How often a lease is extended before it would run out."""
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
    grace_s: float = 5.0
    """How long an app may take to end when it is cancelled."""
    guarded: bool = False
    """A `Guard` extends the leases. Without one the runner's loop does, and an app that blocks it
    may lose them: a runner inside another program must not start a thread that ends the process."""
    environment: bool = False
    """With one slot: put the call token and the gateway's address into the environment
    (`TOKEN_VARIABLE`, `GATEWAY_VARIABLE`), for programs that the app starts."""


class Runner:
    """Runs one app's attempts until stopped.

    Args:
        store: an open store.
        app: the app.
        config: see `RunnerConfig`.
        told: called with what was claimed, before any app is.
        end: ends the process, for the reason that it is given; None: it is not the runner's own.
    """

    def __init__(
        self,
        store: Store,
        app: App,
        config: RunnerConfig | None = None,
        told: Callable[[Sequence[Claim]], None] | None = None,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store = store
        self._end = end
        self._told = told
        self._app = app
        self._config = config or RunnerConfig()
        self._resources: dict[str, NamedResources] = {}
        self._running: dict[str, AttemptRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        self._stuck = 0
        self._pid = os.getpid()
        self._main: asyncio.Task[Any] | None = None
        self._failing_since: float | None = None
        """When the store last stopped taking what it is told, by `time.monotonic`."""
        self._leaving = False
        self.spent = False
        """It ran an attempt that was to be run alone, and takes no other: what that left behind
        must not be blamed on another one. Only where a `Guard` says that it can be replaced."""
        self._runs: Sequence[str | None] = [self._config.run_id]
        self.claimed = 0
        """Attempts so far, those that are over included."""
        self._pool = ThreadPoolExecutor(self._config.slots, thread_name_prefix="lightspan-app")

    async def run(self) -> None:
        """Work until `stop` is called, or until an app is stuck past its time limit: threads, and
        tasks that swallow their cancellation, cannot be ended, so the process has to be replaced.
        """
        self._main = asyncio.current_task()
        os.environ.setdefault("OPENAI_API_KEY", PLACEHOLDER_KEY)
        threads.carry()
        with suppress(Exception):  # each scope tries it again, and notes why it failed
            wire.install()  # it imports the SDK, which no attempt's time should go to
        beat = None if self._config.guarded else asyncio.create_task(self._heartbeats())
        try:
            async with self._app.opened():
                await self._claim_loop()
                while self._tasks:
                    self._freed.clear()
                    await self._freed.wait()
        except asyncio.CancelledError:
            self.check_loop()
            raise
        finally:
            self._leaving = True
            for task in self._tasks:  # there are some only if this runner itself is cancelled
                task.cancel()
            if beat is not None:
                beat.cancel()
                await asyncio.gather(beat, return_exceptions=True)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await wire.aclose()
            self._pool.shutdown(wait=not self._stuck, cancel_futures=True)

    def work_for(self, run_ids: Sequence[str]) -> None:
        """Claim the rollouts of these runs only, from now on; none: claim nothing."""
        self._runs = list(run_ids)
        self._freed.set()

    def _leave(self, run_id: str) -> None:
        log.warning("run %s asks for another app than this runner has", run_id)
        self._runs = [each for each in self._runs if each not in (run_id, None)]

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
        for attempt in self.attempts:
            attempt.stop()

    @property
    def stuck(self) -> bool:
        """Whether an app ran past its limit and still holds its thread, or its task."""
        return self._stuck > 0

    @property
    def config(self) -> RunnerConfig:
        """How it works."""
        return self._config

    @property
    def attempts(self) -> list[AttemptRun]:
        """The attempts under way; callable from any thread."""
        return list(self._running.values())

    def attempt(self, attempt_id: str) -> AttemptRun | None:
        """The attempt, if it is under way; callable from any thread."""
        return self._running.get(attempt_id)

    async def run_once(self, claim: Claim) -> None:
        """Run one claimed attempt and report it."""
        await AttemptRun(self, claim).run()

    async def _claim_loop(self) -> None:
        last = time.monotonic()
        while not self._stopping.is_set() and not self.stuck and not self.spent:
            self._freed.clear()
            is_alone = any(attempt.claim.alone for attempt in self.attempts)
            free = 0 if is_alone else self._config.slots - len(self._tasks)
            claims = await self._claim(free) if free else []
            if claims:
                self._launch(claims)
                last = time.monotonic()
            elif free:
                idle_s = time.monotonic() - last
                await within(_pause_after(idle_s, self._config.poll_s), self._freed)
            else:
                await self._freed.wait()

    async def _claim(self, free: int) -> list[Claim]:
        config = self._config
        claims: list[Claim] = []
        try:
            for run_id in self._runs:
                if claims and claims[0].alone:
                    break
                left, idle = free - len(claims), not self._tasks and not claims
                claims += await self._store.claim(config.name, left, config.lease_s, run_id, idle)
        except StoreError as error:
            log.warning("the runner cannot claim: %s", error)
            self._note_store(error)
        else:
            self._note_store(None)
        return claims

    def _note_store(self, error: StoreError | None) -> None:
        """End a process that the store has not listened to for a lease: what an app did to it, such
        as a limit for files, is not known, and another process may work. From any thread."""
        now = time.monotonic()
        if error is None:
            self._failing_since = None
            return
        self._failing_since = self._failing_since or now
        lease_s = self._config.lease_s
        if self._end is not None and now - self._failing_since >= lease_s:
            self._end(f"it could not write to the store for {lease_s:g} s: {error}")

    def _launch(self, claims: Sequence[Claim]) -> None:
        self.claimed += len(claims)
        self.spent = self._config.guarded and claims[0].alone
        for claim in claims:
            attempt = AttemptRun(self, claim)
            attempt.task = asyncio.create_task(attempt.run(), name=claim.attempt.attempt_id)
            self._running[claim.attempt.attempt_id] = attempt
            self._tasks.add(attempt.task)
            attempt.task.add_done_callback(partial(self._ended, claim.attempt.attempt_id))
        if self._told is not None:
            self._told(claims)

    def _ended(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running.pop(attempt_id, None)
        self._freed.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("attempt %s: the runner failed", attempt_id, exc_info=task.exception())

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / BEATS_PER_LEASE)
            for attempt in await self.extend(self._store):
                attempt.lose()

    async def extend(self, store: Store) -> list[AttemptRun]:
        """Extend the leases of the attempts under way; returns those that are lost. Callable from
        another thread, whose loop the store is open in."""
        refs = [attempt.ref for attempt in self.attempts]
        if not refs:
            return []
        try:
            lost = await store.heartbeat(refs, self._config.lease_s)
        except StoreError as error:
            log.warning("the runner cannot extend its leases: %s", error)
            self._note_store(error)
            return []
        self._note_store(None)
        attempts = [self.attempt(ref.attempt_id) for ref in lost]
        return [attempt for attempt in attempts if attempt is not None]

    def leave_alone(self, attempt: AttemptRun, ending: Ending) -> None:
        """Report an attempt whose app does not end, and wait for it no longer."""
        assert attempt.task is not None
        self._stuck += 1
        attempt.task.add_done_callback(self._unstuck)
        self._tasks.discard(attempt.task)
        task = asyncio.create_task(attempt.finish(ending))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, attempt.ref.attempt_id))

    def end_child(self) -> None:
        """End a process that an app has forked and in which it returns: it is no runner."""
        if os.getpid() != self._pid:
            os._exit(0)

    def check_loop(self) -> None:
        """Somebody cancels what runs here. If that was no one of ours, it was an app: end the
        process, or its attempts would be given back as if we had stopped them, and the app would do
        it again, for ever and unnamed."""
        if self._end is not None and not self._stopping.is_set():
            self._end("an app cancelled its runner's tasks, or stopped its event loop")

    def _unstuck(self, task: asyncio.Task[None]) -> None:
        self._stuck -= 1

    async def _resources_of(self, resources_id: str) -> NamedResources:
        if not resources_id:
            return {}
        if resources_id not in self._resources:
            self._resources[resources_id] = await self._store.get_resources(resources_id)
        return self._resources[resources_id]


def _pause_after(idle_s: float, shortest_s: float) -> float:
    """Seconds until the next look at a queue that has been empty for `idle_s`."""
    return max(shortest_s, min(_LONGEST_PAUSE_S, idle_s / 100))


class AttemptRun:
    """One attempt in the hands of a runner."""

    def __init__(self, runner: Runner, claim: Claim) -> None:
        self.claim = claim
        self.ref = AttemptRef(claim.attempt.attempt_id, claim.attempt.epoch)
        self.task: asyncio.Task[None] | None = None
        self.deadline: float | None = None
        """When the app has to have ended, by `time.monotonic`; None while there is no limit."""
        self.ending: Ending | None = None
        """How the app has ended; what is left is to report."""
        self._runner = runner
        self._store = runner._store
        self._scope: Scope | None = None
        self._stopping = False
        self._limit: asyncio.Timeout | None = None
        """Ends the app when its time is over; None while there is no limit."""
        self._expecting: asyncio.TimerHandle | None = None
        """Sees to it that it has ended soon after."""
        self._given_s = 0.0
        self._root = new_span_id()
        self._started = now_ns()

    async def run(self) -> None:
        """Run the app, keep its spans, report."""
        if not self._is_ours():
            # its run was resumed with another app; no try is used up
            text = f"for the app {self.claim.rollout.app}, not {self._runner._config.app}"
            self._runner._leave(self.claim.rollout.run_id)
            await self.finish(STOPPED._replace(message=text))
            return
        try:
            ending = await self._prepared_and_executed()
        except asyncio.CancelledError:
            if not self._stopping:
                self._runner.check_loop()
            await asyncio.shield(self.finish(STOPPED))
            raise
        await self.finish(ending)

    async def _prepared_and_executed(self) -> Ending:
        try:
            self._scope, inputs = await self._prepare()
        except LightspanError as error:
            return Ending(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, str(error))
        return await self._execute(self._scope, inputs)

    @property
    def _is_stopped(self) -> bool:
        """Whether it is cancelled by us: an app may cancel the task that it runs in, too."""
        main = self._runner._main
        return self._stopping or main is None or self._runner._leaving or main.cancelling() > 0

    def stop(self) -> None:
        """Cancel it: it is lost, and its rollout queued again without using up a try."""
        if self.task is not None and self.ending is None and not self._stopping:
            self._stopping = True
            self.task.cancel()
            self._expect_end(STOPPED)

    def lose(self) -> None:
        """Stop it, because its lease is another runner's."""
        if self.ending is None:
            log.warning("attempt %s lost its lease and is stopped", self.ref.attempt_id)
            self.stop()

    def too_long(self, why: str = "") -> Ending:
        """The ending of an app that has run out of time."""
        text = f"the app ran longer than {self.claim.rollout.timeout_s:g} s{why}"
        return Ending(AttemptStatus.TIMEOUT, Outcome.TIMEOUT, text)

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the app when its time is over, and see to it that it has then ended soon."""
        timeout = self.claim.rollout.timeout_s
        async with asyncio.timeout(timeout) as limit:
            if timeout is None:
                yield limit
                return
            self._limit, self.deadline = limit, time.monotonic() + timeout
            self._expect_end_at(limit)
            try:
                yield limit
            finally:
                self._limit = None
                assert self._expecting is not None
                self._expecting.cancel()

    def _expect_end_at(self, limit: asyncio.Timeout) -> None:
        # The grace begins when the timeout is being handled: a loop that was blocked for long would
        # otherwise come to both at once.
        when = limit.when()
        assert when is not None
        loop = asyncio.get_running_loop()
        self._expecting = loop.call_at(when, self._expect_end, self.too_long())

    def give_time(self, seconds: float) -> None:
        """Let it end that much later: a neighbour has kept the loop from it for so long.

        No attempt gets more than its limit once more, whatever its neighbours do. To be called in
        the loop.
        """
        limit, limit_s = self._limit, self.claim.rollout.timeout_s
        if limit is None or limit_s is None or limit.expired() or self._stopping:
            return
        more = min(seconds, limit_s - self._given_s)
        when = limit.when()
        assert when is not None
        assert self.deadline is not None
        assert self._expecting is not None
        self._given_s += more
        self.deadline += more
        self._expecting.cancel()
        limit.reschedule(when + more)
        self._expect_end_at(limit)

    def _expect_end(self, ending: Ending) -> None:
        """The app is being cancelled: report it so if it goes on all the same."""
        grace_s = self._runner._config.grace_s
        asyncio.get_running_loop().call_later(grace_s, self._give_up, ending)

    def _give_up(self, ending: Ending) -> None:
        if self.task is None or self.task.done() or self.ending is not None:
            return
        where = in_words(of_coroutine(self.task.get_coro()))
        text = f"{ending.message} and went on when it was cancelled: {where}"
        log.warning("attempt %s: %s", self.ref.attempt_id, text)
        self._runner.leave_alone(self, ending._replace(message=text))

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
        return scope, Inputs(rollout, resources, attempt_llm(scope))

    async def _execute(self, scope: Scope, inputs: Inputs) -> Ending:
        app, task = self._runner._app, _current_task()
        if self._runner._config.environment:
            os.environ[TOKEN_VARIABLE] = scope.call_token
            os.environ[GATEWAY_VARIABLE] = scope.gateway_url or ""
        try:
            async with self._limited() as limit:
                value = await (self._call_async if app.is_async else self._call_sync)(scope, inputs)
        except asyncio.CancelledError as error:
            if _being_cancelled() and self._is_stopped:
                raise
            return self._failed(scope, error)  # the app cancelled itself
        except GeneratorExit as error:
            if _current_task() is not task:  # closed under us: nothing can be awaited any more
                raise
            return self._failed(scope, error)
        except BaseException as error:  # SystemExit, and what is no Exception, such as pytest.fail
            if isinstance(error, TimeoutError) and limit.expired():
                return self.too_long()
            return self._failed(scope, error)
        if isinstance(value, _Raised):
            return self._failed(scope, value.error)
        return returned(value)

    def _failed(self, scope: Scope, error: BaseException) -> Ending:
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

    async def _call_async(self, scope: Scope, inputs: Inputs) -> Any:
        try:
            with open_scope(scope):
                return await self._runner._app.call(inputs)
        finally:
            self._runner.end_child()

    async def _call_sync(self, scope: Scope, inputs: Inputs) -> Any:
        finished = threading.Event()

        def work() -> Any:
            try:
                with open_scope(scope):
                    return self._runner._app.call(inputs)
            except BaseException as error:
                return _Raised(error)
            finally:
                self._runner.end_child()
                finished.set()

        # Shielded, because a thread cannot be cancelled: the app in it runs on whatever happens
        # here.
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
        """A sync app has ended after its outcome was reported: it ran too long, or was stopped."""
        self._runner._stuck -= was_stuck
        if not future.cancelled() and future.exception() is None:
            value = future.result()
            if inspect.iscoroutine(value):
                value.close()  # nobody will await it

    async def finish(self, ending: Ending, store: Store | None = None) -> None:
        """Keep the spans and report; nothing if that was begun already.

        Args:
            ending: how the app ended.
            store: another one than the runner's, of the thread that calls.
        """
        if self.ending is not None:
            return
        self.ending = ending
        store = store or self._store
        damage = [] if self._scope is None else await self._keep_spans(self._scope, ending, store)
        report = self.claim.attempt.report(**ending._asdict(), damage=damage)
        for pause in _REPORT_PAUSES_S:
            try:
                await store.report([report])
                return
            except StoreError as error:
                log.warning("attempt %s cannot be reported: %s", self.ref.attempt_id, error)
                if pause is not None:
                    await asyncio.sleep(pause)

    async def report_ended(self, store: Store, where: str) -> None:
        """Report how it had ended, which its own loop is kept from: it is blocked since.

        Nothing changes if it was reported. Else its spans may be missing, and it is damaged.

        Args:
            store: of the thread that calls.
            where: what blocks the loop.
        """
        assert self.ending is not None
        damage = [f"it had ended when something of it blocked the event loop: {where}"]
        report = self.claim.attempt.report(**self.ending._asdict(), damage=damage)
        try:
            await store.report([report])
        except StoreError as error:
            log.warning("attempt %s cannot be reported: %s", self.ref.attempt_id, error)

    async def _keep_spans(self, scope: Scope, ending: Ending, store: Store) -> list[str]:
        """Keep what was recorded; returns the capture errors."""
        scope.recorder.give_up()
        failed = ending.status is not AttemptStatus.SUCCEEDED
        root = self._span(
            scope,
            name="attempt",
            kind=SpanKind.CHAIN,
            span_id=self._root,
            start_ns=self._started,
            status=SpanStatus.ERROR if failed else SpanStatus.OK,
            status_message=ending.message,
            attributes={c.ROLLOUT_ID: scope.rollout_id, c.ATTEMPT_ID: scope.attempt_id},
        )
        spans = [*scope.recorder.drain(), root]
        damage = scope.recorder.damages()
        try:
            await store.add_spans(self.ref, spans)
        except LightspanError as error:
            damage.append(f"spans could not be stored: {error}")
        return damage

    def _span(self, scope: Scope, **fields: Any) -> Span:
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


def _being_cancelled() -> bool:
    """Whether somebody outside cancels the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _current_task() -> asyncio.Task[Any] | None:
    """The task that runs; None outside a loop, where the garbage collector closes coroutines."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _adopt(context: Context) -> None:
    """Set here, too, the variables that were set in that context: the rest of the app runs here."""
    for variable, value in context.items():
        if variable.get(_ABSENT) is not value:
            variable.set(value)


_ABSENT: Final = object()
