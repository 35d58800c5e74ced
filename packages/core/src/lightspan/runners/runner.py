"""Claim attempts, run the app in the context of each, and report the results.

A runner has one event loop. Attempts of an async app share the loop. A sync app gets a worker
thread per attempt. If a sync app returns an awaitable, the event loop awaits it, so it must not
block. Exceptions of the app become outcomes of attempts (`outcome`) and do not end the runner.

If an app ignores its cancellation, its attempt is reported, and the runner ends when all other
attempts have ended (`Runner.stuck`). An app that blocks the loop blocks the whole runner. In a
process that can be replaced, a `LoopWatchdog` detects this.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.errors import StoreError
from lightspan.runners.app import App
from lightspan.runners.attempt import AttemptRun
from lightspan.runners.gateway_probe import GatewayEndpoint
from lightspan.runners.outcome import STOPPED, AttemptResult
from lightspan.runners.protocol import RunnerConfig
from lightspan.schema import clock
from lightspan.schema.records import Claim, new_id
from lightspan.schema.resources import NamedResources
from lightspan.stores.aio import wait_for_event
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

_WARN_INTERVAL_S: Final = 60.0
"""Minimum seconds between two equal warnings while the store is out of reach."""
_MAX_DOUBLINGS: Final = 8
"""How often the pause between claims is doubled while the store refuses them: to about 5 s."""
PLACEHOLDER_KEY: Final = "lightspan-placeholder"
"""Value of `OPENAI_API_KEY` if it is not set, so that the app can create an OpenAI client."""


class Runner:
    """A runner of one app: it claims and runs attempts until it is stopped.

    Args:
        store: an open store.
        app: the app.
        config: configuration of the runner; None for the defaults.
        on_change: function that is called after each claim, before the app, and after the end of
            each attempt; None to call nothing.
    """

    def __init__(
        self,
        store: Store,
        app: App,
        config: RunnerConfig | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self._on_change = on_change or (lambda: None)
        self.app = app
        self.config = config or RunnerConfig()
        self._timings = self.config.timings
        self._resources: dict[str, NamedResources] = {}
        self._running: dict[str, AttemptRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        """Set when an attempt has ended, the runs have changed or the runner is to stop."""
        self.stuck = 0
        """Number of apps that were cancelled or timed out and still occupy their thread or task."""
        self._main: asyncio.Task[Any] | None = None
        self._doubts: dict[str, asyncio.Task[bool] | None] = {}
        """Run id → the latest check whether the run's gateway answers, of runs whose gateway an
        attempt could not reach and that has not answered since. None before the first check."""
        self._probes: dict[str, asyncio.Task[None]] = {}
        """Run id → task that waits until the run's gateway answers. Nothing of the run is claimed
        meanwhile."""
        self._is_ending = False
        self._is_aborted = False
        self._runs: Sequence[str | None] = [self.config.run_id]
        self._unanswered: dict[str | None, str] = {}
        """Run id → request id of a claim that got no answer. The claim is repeated with the same
        request id. Otherwise the attempts that it started would wait until their leases expire."""
        self._refused = 0
        """Number of consecutive claims that the store has refused, or did not answer."""
        self._warned_at: dict[str, float] = {}
        """What the store refuses → time (monotonic clock) of the last warning about it."""
        self._claim_timeout: asyncio.Timeout | None = None
        """Timeout of the claim under way; None if there is none."""
        self._work_poll: asyncio.Task[bool] | None = None
        self._has_work = False
        """Whether the store has reported work, and nothing has been claimed since."""
        self.claimed = 0
        """Number of attempts claimed so far, including those that have ended."""
        self.returned = 0
        """Number of attempts that the store has accepted as stopped, or never answered about."""
        self.finished = 0
        """Number of attempts whose result the store has accepted, without those that were lost."""
        self.pool = ThreadPoolExecutor(self.config.slots, thread_name_prefix="lightspan-app")

    async def run(self) -> None:
        """Claim and run attempts until `stop` is called or an app is stuck past its time limit.

        The process of a stuck app has to be replaced, because threads, and tasks that ignore their
        cancellation, cannot be ended.
        """
        self._main = asyncio.current_task()
        os.environ.setdefault("OPENAI_API_KEY", PLACEHOLDER_KEY)
        carries = context_propagation.carry()
        with suppress(Exception):  # each attempt tries it again, and records why it failed
            sdk_instrumentation.install()  # before a thread of the app begins to import an SDK
        leases, program = None, self.app.program
        if not self.config.has_watchdog:
            leases = asyncio.create_task(self.extend_leases(self.store, asyncio.get_running_loop()))
        try:
            async with nullcontext() if program is None else program.opened():
                await self._claim_loop()
                while self._tasks:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            self._is_ending = True
            self._cancel_work_poll()
            # There are tasks of attempts only if this runner itself is cancelled.
            for task in (*self._tasks, *self._probes.values()):
                task.cancel()
            if leases is not None:
                leases.cancel()
                await asyncio.gather(leases, return_exceptions=True)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await sdk_instrumentation.aclose()
            self.pool.shutdown(wait=not self.stuck, cancel_futures=True)
            if carries:  # the process may be a user's notebook
                context_propagation.stop_carrying()

    def work_for(self, run_ids: Sequence[str]) -> None:
        """Claim only rollouts of the runs `run_ids` from now on. An empty list claims none."""
        self._runs = list(run_ids)
        for run_id in [run_id for run_id in self._probes if run_id not in run_ids]:
            self._probes.pop(run_id).cancel()  # a run that is resumed has a new gateway
            self._doubts.pop(run_id, None)
        self._cancel_work_poll()
        self._changed.set()

    def leave_run(self, run_id: str) -> None:
        """Claim no more rollouts of the run `run_id`, because it trains another app."""
        log.warning("run %s has another app than this runner", run_id)
        self._runs = [run for run in self._runs if run not in (run_id, None)]
        self._cancel_work_poll()

    @property
    def running(self) -> int:
        """Number of attempts under way."""
        return len(self._tasks)

    def stop(self) -> None:
        """Stop claiming attempts; `run` returns when the attempts under way have ended."""
        self._stopping.set()
        self._changed.set()

    def abort(self) -> None:
        """Cancel the attempts under way, and claim no more. Their rollouts are requeued."""
        self._is_aborted = True
        self.stop()
        if self._claim_timeout is not None:
            now = asyncio.get_running_loop().time()
            self._claim_timeout.reschedule(now + self._timings.abort_timeout_s)
        for attempt in self.attempts:
            attempt.stop()

    @property
    def attempts(self) -> list[AttemptRun]:
        """The attempts under way; callable from any thread."""
        return list(self._running.values())

    def attempt(self, attempt_id: str) -> AttemptRun | None:
        """Return the attempt with the id `attempt_id`; None if it is not under way. Thread-safe."""
        return self._running.get(attempt_id)

    # --- claims ---------------------------------------------------------------------------
    async def _claim_loop(self) -> None:
        while not self._stopping.is_set() and not self.stuck:
            self._changed.clear()
            is_alone = any(attempt.claim.alone for attempt in self.attempts)
            free = 0 if is_alone else self.config.slots - len(self._tasks)
            claims = await self._claim(free) if free else []
            if claims:
                self._launch(claims)
                self._has_work = False
            elif free:
                await self._wait_for_work()
            else:
                await self._changed.wait()

    async def _wait_for_work(self) -> None:
        """Wait until the store may have work, but no longer than one poll (`_poll_work`).

        The runner claims after every poll, because a claim also ends expired leases. If the store
        reported work and the last claim got none of it, the runner only pauses briefly, because a
        poll would report the same work again at once. While the store refuses claims, the pause
        grows. The wait also ends when an attempt ends. The poll is then continued in the next wait.
        """
        if self._has_work or self._refused:
            self._has_work = False
            longest_s = 1.5 * self._timings.claim_pause_s * 2 ** min(self._refused, _MAX_DOUBLINGS)
            pause_s = random.uniform(longest_s / 3, longest_s)
            await wait_for_event(pause_s, self._changed)
            return
        self._work_poll = self._work_poll or asyncio.create_task(self._poll_work(self._claimable))
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait([self._work_poll, changed], return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if self._work_poll is not None and self._work_poll.done():
            self._has_work, self._work_poll = self._work_poll.result(), None

    async def _poll_work(self, runs: Sequence[str | None]) -> bool:
        """Wait for work in the store, with a time limit; return whether to claim at once.

        Args:
            runs: ids of the runs whose work counts. None among them stands for any run.
        """
        run_ids = None if None in runs else [run_id for run_id in runs if run_id is not None]
        timeout_s = min(self._timings.max_work_poll_s, self.config.lease_s / 2)
        try:
            return await self.store.await_work(run_ids, timeout_s=timeout_s)
        except StoreError:  # the claim that follows logs it
            return True

    def _cancel_work_poll(self) -> None:
        if self._work_poll is not None:
            self._work_poll.cancel()
        self._work_poll = None

    def await_gateway(self, run_id: str, endpoint: GatewayEndpoint) -> None:
        """Claim nothing of a run until its gateway answers. The attempts would be lost without it.

        Other runs have other gateways, so their attempts are claimed as before.

        Args:
            run_id: id of the run.
            endpoint: the gateway that an attempt could not reach, for example because the trainer
                was killed.
        """
        self._doubts.setdefault(run_id, None)
        if run_id not in self._probes:
            self._probes[run_id] = asyncio.create_task(self._probe(run_id, endpoint))
            self._cancel_work_poll()

    async def _probe(self, run_id: str, endpoint: GatewayEndpoint) -> None:
        """Wait until a gateway answers, so that attempts of its run are claimed again.

        They are also claimed again after `gateway_retry_s` seconds.
        """
        end, has_warned = clock.monotonic() + self._timings.gateway_retry_s, False
        while clock.monotonic() < end and not await self.can_reach(run_id, endpoint):
            if not has_warned:
                has_warned = True
                log.warning(
                    "the gateway %s does not answer: of run %s nothing is claimed until it does",
                    endpoint.url,
                    run_id or "''",
                )
            await asyncio.sleep(self._timings.probe_interval_s)
        del self._probes[run_id]
        self._cancel_work_poll()
        self._changed.set()

    async def can_reach(self, run_id: str, endpoint: GatewayEndpoint) -> bool:
        """Return whether the gateway of a run answers.

        It is checked only if an attempt could not reach it and it has not answered since. Otherwise
        the result is True.
        """
        if run_id not in self._doubts:
            return True
        check = self._doubts[run_id]
        if check is None or check.done():  # else one check is enough for all attempts of the run
            check = self._doubts[run_id] = asyncio.create_task(endpoint.is_open())
        is_open = await asyncio.shield(check)
        if is_open:
            self._doubts.pop(run_id, None)
        return is_open

    @property
    def _claimable(self) -> list[str | None]:
        """Ids of the runs of which attempts are claimed now; None among them stands for any run.

        Runs whose gateway does not answer are left out.
        """
        if None in self._runs and self._probes:  # a claim cannot leave one run out
            return []
        return [run_id for run_id in self._runs if run_id not in self._probes]

    async def _claim(self, free: int) -> list[Claim]:
        """Claim attempts for `free` slots, shared fairly between the runs.

        A run comes first if the store did not answer its last claim. That claim is repeated, and
        its attempts must fit into the free slots. Then come the runs with the fewest attempts in
        this runner, in random order if they have equally many.
        """
        claims: list[Claim] = []
        counts = Counter(attempt.claim.rollout.run_id for attempt in self.attempts)
        runs = self._claimable
        random.shuffle(runs)
        # A run in doubt comes early too: the first ones get a share of the slots only.
        unanswered, doubts = self._unanswered, self._doubts
        runs.sort(key=lambda run: (run not in unanswered, run not in doubts, counts[run or ""]))
        config = self.config
        for number, run_id in enumerate(runs):
            limit = -((len(claims) - free) // (len(runs) - number))  # rounded up
            if limit < 1 or (claims and claims[0].alone):
                break
            is_idle = not self._tasks and not claims
            request_id = self._unanswered.setdefault(run_id, new_id("claim"))
            try:
                async with asyncio.timeout(None) as self._claim_timeout:
                    claims += await self.store.claim(
                        config.name, limit, config.lease_s, run_id, is_idle, request_id=request_id
                    )
            except (StoreError, TimeoutError) as error:
                self._refused += 1
                self._warn("claim", str(error) or "it is ending")
                break
            finally:
                self._claim_timeout = None
            self._refused = 0
            del self._unanswered[run_id]
        return claims

    def _warn(self, act: str, reason: str) -> None:
        """Log that the store refuses `act`, at most once in `_WARN_INTERVAL_S`. Thread-safe."""
        now = clock.monotonic()
        if now - self._warned_at.get(act, -math.inf) >= _WARN_INTERVAL_S:
            self._warned_at[act] = now
            log.warning("the runner cannot %s: %s", act, reason)

    # --- attempts -------------------------------------------------------------------------
    def _launch(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            attempt = AttemptRun(self, claim)
            self._running[attempt.attempt_id] = attempt
            attempt.task = self._track(attempt, attempt.run())
            if self._is_aborted:  # while the claim was under way
                attempt.stop()
        self.claimed += len(claims)
        self._on_change()

    def _track(self, attempt: AttemptRun, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work` as a task of `attempt` that occupies a slot until it ends."""
        task = asyncio.create_task(work, name=attempt.attempt_id)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, attempt.attempt_id))
        return task

    def _ended(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        attempt = self._running.pop(attempt_id, None)
        if task.cancelled() and attempt is not None and attempt.ending is None:
            # it was cancelled before it could begin, and so before it could report
            self._track(attempt, attempt.finish(STOPPED))
        self._changed.set()
        self._on_change()
        if not task.cancelled() and task.exception() is not None:
            log.error("attempt %s: the runner failed", attempt_id, exc_info=task.exception())

    async def extend_leases(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        """Extend the leases of the attempts under way, until cancelled. Callable in any thread.

        An attempt whose lease is lost is aborted.

        Args:
            store: a store that is open in the calling thread.
            loop: the runner's event loop.
        """
        while True:
            await asyncio.sleep(self.config.lease_s / self._timings.heartbeats_per_lease)
            refs = [attempt.ref for attempt in self.attempts]
            try:
                expired = await store.heartbeat(refs, self.config.lease_s) if refs else []
            except StoreError as error:
                self._warn("extend its leases", str(error))
                continue
            for ref in expired:
                if (attempt := self.attempt(ref.attempt_id)) is not None:
                    loop.call_soon_threadsafe(attempt.abort)

    def abandon(self, attempt: AttemptRun, ending: AttemptResult) -> None:
        """Report an attempt although its app does not end, and stop waiting for the app.

        Args:
            attempt: the attempt.
            ending: the result to report.
        """
        assert attempt.task is not None
        self.stuck += 1
        attempt.task.add_done_callback(self._release)
        self._tasks.discard(attempt.task)
        self._track(attempt, attempt.finish(ending))

    def _release(self, _: asyncio.Task[None]) -> None:
        self.stuck -= 1

    @property
    def is_leaving(self) -> bool:
        """Whether the runner is ending, so that it cancels the attempts under way."""
        return self._main is None or self._is_ending or self._main.cancelling() > 0

    async def resources_of(self, resources_id: str) -> NamedResources:
        """Return the resources with the id `resources_id`, from a cache or the store.

        Empty for an empty id.

        Raises:
            StoreError: the resources cannot be read.
        """
        if not resources_id:
            return {}
        if resources_id not in self._resources:
            self._resources[resources_id] = await self.store.get_resources(resources_id)
        return self._resources[resources_id]
