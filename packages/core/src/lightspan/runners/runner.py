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
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.errors import StoreError
from lightspan.runners.app import App
from lightspan.runners.attempt import AttemptRun
from lightspan.runners.gateway_probe import PROBE_S, GatewayEndpoint
from lightspan.runners.outcome import STOPPED, AttemptResult
from lightspan.schema import clock
from lightspan.schema.records import Claim, new_id
from lightspan.schema.resources import NamedResources
from lightspan.stores.aio import wait_for_event
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

_MAX_LOOK_S: Final = 20.0
"""For how long the store is asked whether there is work, before it is claimed all the same."""
_RETRY_TIMEOUT_S: Final = 20.0
"""For so long: a trainer that is gone is known to be by then, and attempts of one that is not have
to fail where its gateway cannot be reached from here."""
HEARTBEATS_PER_LEASE: Final = 6
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
    """About how long it pauses after a claim that got nothing though there was something, as where
    others are quicker."""
    name: str = field(default_factory=lambda: new_id("runner"))
    grace_s: float = 5.0
    """How long an app may take to end when it is cancelled."""
    guarded: bool = False
    """A `Guard` extends the leases. Without one the runner's loop does, and an app that blocks it
    may lose them: a runner inside another program must not start a thread that ends the process."""
    environment: bool = False
    """With one slot: put the call token and the gateway's address into the environment
    (`TOKEN_VARIABLE`, `GATEWAY_VARIABLE`), for programs that the app starts."""
    relay: str = ""
    """Where model calls go in place of the gateway's own address, which is of another machine
    (`lightspan.stores.relay_url`)."""


class Runner:
    """Runs one app's attempts until stopped.

    Args:
        store: an open store.
        app: the app.
        config: see `RunnerConfig`.
        on_claim: called after each claim, before any app is.
    """

    def __init__(
        self,
        store: Store,
        app: App,
        config: RunnerConfig | None = None,
        on_claim: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self._on_claim = on_claim
        self.app = app
        self.config = config or RunnerConfig()
        self._resources: dict[str, NamedResources] = {}
        self._running: dict[str, AttemptRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        self._stuck = 0
        self._main: asyncio.Task[Any] | None = None
        self._doubted: tuple[GatewayEndpoint, float] | None = None
        """A gateway that an attempt could not reach, and since when, by `clock.monotonic`."""
        self._has_told_doubt = False
        self._leaving = False
        self._aborted = False
        self._runs: Sequence[str | None] = [self.config.run_id]
        self._unanswered: dict[str | None, str] = {}
        """Run → the id of a claim that got no answer: it is asked for again, not anew, or what it
        began would be stranded until its lease ends."""
        self._look: asyncio.Task[bool] | None = None
        """The store is asked for work, and has not answered yet."""
        self._has_looked = False
        """It said that there is some, and nothing has been claimed since."""
        self.claimed = 0
        """Attempts so far, those that are over included."""
        self.pool = ThreadPoolExecutor(self.config.slots, thread_name_prefix="lightspan-app")

    async def run(self) -> None:
        """Work until `stop` is called, or until an app is stuck past its time limit: threads, and
        tasks that swallow their cancellation, cannot be ended, so the process has to be replaced.
        """
        self._main = asyncio.current_task()
        os.environ.setdefault("OPENAI_API_KEY", PLACEHOLDER_KEY)
        carries = context_propagation.carry()
        with suppress(Exception):  # each scope tries it again, and notes why it failed
            sdk_instrumentation.install()  # before a thread of the app's begins to import an SDK
        beat = None if self.config.guarded else asyncio.create_task(self._heartbeats())
        try:
            async with self.app.opened():
                await self._claim_loop()
                while self._tasks:
                    self._freed.clear()
                    await self._freed.wait()
        finally:
            self._leaving = True
            self._stop_looking()
            for task in self._tasks:  # there are some only if this runner itself is cancelled
                task.cancel()
            if beat is not None:
                beat.cancel()
                await asyncio.gather(beat, return_exceptions=True)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await sdk_instrumentation.aclose()
            self.pool.shutdown(wait=not self._stuck, cancel_futures=True)
            if carries:  # the process may be somebody's notebook
                context_propagation.stop_carrying()

    def work_for(self, run_ids: Sequence[str]) -> None:
        """Claim the rollouts of these runs only, from now on; none: claim nothing."""
        self._runs = list(run_ids)
        self._stop_looking()
        self._freed.set()

    def leave_run(self, run_id: str) -> None:
        """Claim nothing more of this run: it asks for another app."""
        log.warning("run %s asks for another app than this runner has", run_id)
        self._runs = [each for each in self._runs if each not in (run_id, None)]
        self._stop_looking()

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
        self._aborted = True
        self.stop()
        for attempt in self.attempts:
            attempt.stop()

    @property
    def stuck(self) -> bool:
        """Whether an app ran past its limit and still holds its thread, or its task."""
        return self._stuck > 0

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
        while not self._stopping.is_set() and not self.stuck:
            self._freed.clear()
            is_alone = any(attempt.claim.alone for attempt in self.attempts)
            free = 0 if is_alone else self.config.slots - len(self._tasks)
            if free and not await self._can_reach_gateway():
                await wait_for_event(PROBE_S, self._stopping)
                continue
            claims = await self._claim(free) if free else []
            if claims:
                self._launch(claims)
                self._has_looked = False
            elif free:
                await self._wait_for_work()
            else:
                await self._freed.wait()

    async def _wait_for_work(self) -> None:
        """Until the store says that there is something, or it is time to claim all the same: leases
        that ran out are lost by that.

        What is asked is waited for again where an attempt ended meanwhile, and not asked anew. If
        what was there is somebody else's by now, or is to be run alone and this runner has others,
        the store would say again that it is there: then there is a pause.
        """
        if self._has_looked:
            self._has_looked = False
            await wait_for_event(random.uniform(0.5, 1.5) * self.config.poll_s, self._freed)
            return
        self._look = self._look or asyncio.create_task(self._look_for_work(list(self._runs)))
        freed = asyncio.create_task(self._freed.wait())
        await asyncio.wait([self._look, freed], return_when=asyncio.FIRST_COMPLETED)
        freed.cancel()
        if self._look is not None and self._look.done():
            self._has_looked, self._look = self._look.result(), None

    async def _look_for_work(self, runs: Sequence[str | None]) -> bool:
        """Whether the store said that there is some, or nothing."""
        run_ids = None if None in runs else [run_id for run_id in runs if run_id is not None]
        timeout_s = min(_MAX_LOOK_S, self.config.lease_s / 2)
        try:
            return await self.store.await_work(run_ids, timeout_s=timeout_s)
        except StoreError:  # the claim that follows says so
            return True

    def _stop_looking(self) -> None:
        """What was asked is not what is to be known now."""
        if self._look is not None:
            self._look.cancel()
        self._look = None

    def doubt(self, way: GatewayEndpoint) -> None:
        """An attempt was lost for want of its gateway: see that it is there before others are lost
        in the same way, as where the trainer was killed a moment ago."""
        self._doubted = self._doubted or (way, clock.monotonic())

    async def _can_reach_gateway(self) -> bool:
        if self._doubted is None:
            return True
        way, since = self._doubted
        if clock.monotonic() - since < _RETRY_TIMEOUT_S and not await way.is_open():
            if not self._has_told_doubt:
                text = "the gateway %s does not answer: nothing is claimed until it does"
                log.warning(text, way.url)
            self._has_told_doubt = True
            return False
        self._doubted, self._has_told_doubt = None, False
        return True

    async def _claim(self, free: int) -> list[Claim]:
        claims: list[Claim] = []
        try:
            runs, wanting = self._in_turn(), []
            for place, run_id in enumerate(runs):
                share = max(1, (free - len(claims)) // (len(runs) - place))
                found = await self._claim_of(run_id, min(share, free - len(claims)), claims)
                if len(found) == share:
                    wanting.append(run_id)
            for run_id in wanting:  # what is left by those who had nothing
                await self._claim_of(run_id, free - len(claims), claims)
        except StoreError as error:
            log.warning("the runner cannot claim: %s", error)
        return claims

    def _in_turn(self) -> list[str | None]:
        """Return the runs to claim of, each of which is to have its share. Who got no answer is
        first: what it was given fits into what is free now. Then who has least here."""
        held = Counter(attempt.claim.rollout.run_id for attempt in self.attempts)
        runs = random.sample(self._runs, len(self._runs))  # as with a single slot, all have as much
        return sorted(runs, key=lambda run: (run not in self._unanswered, held[run or ""]))

    async def _claim_of(
        self, run_id: str | None, most: int, claims: list[Claim]
    ) -> Sequence[Claim]:
        """Claim so many of a run, beside what was claimed now. Raises `StoreError`."""
        if most < 1 or (claims and claims[0].alone):
            return []
        config, idle = self.config, not self._tasks and not claims
        request_id = self._unanswered.setdefault(run_id, new_id("claim"))
        found = await self.store.claim(
            config.name, most, config.lease_s, run_id, idle, request_id=request_id
        )
        del self._unanswered[run_id]
        claims += found
        return found

    def _launch(self, claims: Sequence[Claim]) -> None:
        self.claimed += len(claims)
        for claim in claims:
            attempt = AttemptRun(self, claim)
            attempt.task = asyncio.create_task(attempt.run(), name=claim.attempt.attempt_id)
            self._running[claim.attempt.attempt_id] = attempt
            self._tasks.add(attempt.task)
            attempt.task.add_done_callback(partial(self._ended, claim.attempt.attempt_id))
            if self._aborted:  # the answer to a claim that was on its way
                attempt.stop()
        if self._on_claim is not None:
            self._on_claim()

    def _ended(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        attempt = self._running.pop(attempt_id, None)
        if task.cancelled() and attempt is not None and attempt.ending is None:
            self._give_back(attempt)  # it was cancelled before it could begin, and so report
        self._freed.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("attempt %s: the runner failed", attempt_id, exc_info=task.exception())

    def _give_back(self, attempt: AttemptRun) -> None:
        """Report an attempt that never began."""
        task = asyncio.create_task(attempt.finish(STOPPED))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, attempt.attempt_id))

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self.config.lease_s / HEARTBEATS_PER_LEASE)
            await self._extend()

    async def _extend(self) -> None:
        for attempt in await self.extend(self.store):
            attempt.abort()

    async def extend(self, store: Store) -> list[AttemptRun]:
        """Extend the leases of the attempts under way; returns those that are lost. Callable from
        another thread, whose loop the store is open in."""
        refs = [attempt.ref for attempt in self.attempts]
        if not refs:
            return []
        try:
            lost = await store.heartbeat(refs, self.config.lease_s)
        except StoreError as error:
            log.warning("the runner cannot extend its leases: %s", error)
            return []
        attempts = [self.attempt(ref.attempt_id) for ref in lost]
        return [attempt for attempt in attempts if attempt is not None]

    def abandon(self, attempt: AttemptRun, ending: AttemptResult) -> None:
        """Report an attempt whose app does not end, and wait for it no longer."""
        assert attempt.task is not None
        self.count_stuck(1)
        attempt.task.add_done_callback(lambda _: self.count_stuck(-1))
        self._tasks.discard(attempt.task)
        task = asyncio.create_task(attempt.finish(ending))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, attempt.ref.attempt_id))

    def count_stuck(self, change: int) -> None:
        """So many more apps hold their thread, or task, past their end."""
        self._stuck += change

    @property
    def is_leaving(self) -> bool:
        """Whether it ends, and cancels what it has under way."""
        return self._main is None or self._leaving or self._main.cancelling() > 0

    async def resources_of(self, resources_id: str) -> NamedResources:
        """Raises `StoreError` if they cannot be had."""
        if not resources_id:
            return {}
        if resources_id not in self._resources:
            self._resources[resources_id] = await self.store.get_resources(resources_id)
        return self._resources[resources_id]
