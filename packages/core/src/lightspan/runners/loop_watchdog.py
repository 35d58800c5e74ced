"""Watch a runner's event loop from a thread with its own event loop and store connection.

The watchdog extends the leases, sends heartbeats to the parent process, and checks that the
runner's event loop runs: a blocked loop runs neither timeouts nor other attempts. If an attempt
blocks the loop and is past its time limit, the watchdog reports this attempt and requeues the other
attempts. Then it ends the process, which the parent replaces.

C code that holds the GIL blocks the watchdog too. Then the parent gets no heartbeat, and ends the
process (`local`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

from lightspan.capture.context import pushed_in
from lightspan.runners.attempt import AttemptRun
from lightspan.runners.outcome import STOPPED
from lightspan.runners.runner import Runner
from lightspan.runners.stack_location import describe_stack, frame_stack
from lightspan.schema import clock
from lightspan.schema.spans import text_of
from lightspan.stores import open_store
from lightspan.stores.aio import use_real_clock, wait_for_event
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)


class LoopWatchdog:
    """Watchdog of a runner. Create it in the runner's thread and event loop.

    Args:
        runner: a runner with `RunnerConfig.has_watchdog`.
        store_url: URL of the store of the runner's attempts.
        beat: function that sends a heartbeat. It is called at every check, in the watchdog's
            thread.
        end: function that ends the process. Its argument is the reason, or None if an app is stuck.
    """

    def __init__(
        self,
        runner: Runner,
        store_url: str,
        beat: Callable[[], None],
        end: Callable[[str | None], None],
    ) -> None:
        self._runner = runner
        self._timings = runner.config.timings
        self._store_url = store_url
        self._beat = beat
        self._end = end
        self._runner_loop = asyncio.get_running_loop()
        self._runner_thread = threading.get_ident()
        self._has_turned = True
        """Whether the runner's loop has run a callback since the last check."""
        self._blocked_s = 0.0
        """Seconds for which `_blocking` has blocked the loop, computed from the number of checks.
        Time for which the process was suspended does not count."""
        self._blocking: AttemptRun | None = None
        """The attempt that blocked the loop at the last such check; None if unknown."""
        self._warned: set[str] = set()
        self._stopping = asyncio.Event()
        # the standard library's, whatever event loop policy the app has set
        self._loop = asyncio.SelectorEventLoop()
        use_real_clock(self._loop)
        self._thread = threading.Thread(target=self._run, name="lightspan-watchdog", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._watch())
        except BaseException as error:
            log.exception("a runner's watchdog failed")
            self._end(f"its watchdog failed: {text_of(error)}")

    async def _watch(self) -> None:
        async with open_store(self._store_url) as store:
            leases = asyncio.create_task(self._runner.extend_leases(store, self._runner_loop))
            interval_s = self._timings.watchdog_interval_s
            while not await wait_for_event(interval_s, self._stopping):
                self._beat()
                await self._check_loop(store)
                if leases.done():
                    leases.result()
            leases.cancel()
            await asyncio.gather(leases, return_exceptions=True)

    async def _check_loop(self, store: Store) -> None:
        if self._has_turned:
            self._has_turned, self._blocked_s = False, 0.0
            self._runner_loop.call_soon_threadsafe(setattr, self, "_has_turned", True)
            return
        frame = sys._current_frames().get(self._runner_thread)
        blocking = self._attempt_in(frame)
        # it may go on right after another attempt, before the loop has run the callback above
        if blocking is not self._blocking:
            self._blocking, self._blocked_s = blocking, 0.0
        self._blocked_s += self._timings.watchdog_interval_s
        where = describe_stack(frame_stack(frame))
        if self._is_overdue(blocking):
            await self._give_back(store, blocking, where)
        elif self._blocked_s >= self._timings.blocked_warning_s and blocking is not None:
            self._warn(blocking.attempt_id, where)

    def _is_overdue(self, blocking: AttemptRun | None) -> bool:
        """Return whether the process has to end, because its event loop is blocked.

        It has to end if the attempt that blocks the loop is past its time limit. If that attempt is
        unknown, any unfinished attempt past its time limit counts. If no attempt is unfinished, the
        process has to end after `blocked_warning_s` seconds.

        Args:
            blocking: the attempt that blocks the loop; None if unknown.
        """
        unfinished = [attempt for attempt in self._runner.attempts if attempt.ending is None]
        if not unfinished or (blocking is not None and blocking.ending is not None):
            # code of an attempt that has ended; an app that is being opened may take its time
            return self._runner.claimed > 0 and self._blocked_s >= self._timings.blocked_warning_s
        suspects, now = unfinished if blocking is None else [blocking], clock.monotonic()
        is_past = any(x.deadline is not None and now >= x.deadline for x in suspects)
        return is_past and self._blocked_s >= self._runner.config.grace_s

    def _attempt_in(self, frame: FrameType | None) -> AttemptRun | None:
        """Return the attempt whose code the event loop executes; None if unknown.

        If there is only one attempt, that one is returned. If there are several, the attempt is
        found by the context of the loop's current callback, which only an event loop of the
        standard library shows.

        Args:
            frame: innermost frame of the runner's thread.
        """
        if len(attempts := self._runner.attempts) == 1:
            return attempts[0]
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
            frame = frame.f_back
        agent = None if frame is None else pushed_in(frame.f_locals["self"]._context)
        return None if agent is None else self._runner.attempt(agent.scope.attempt_id)

    async def _give_back(self, store: Store, blocking: AttemptRun | None, where: str) -> None:
        """End the process, because an attempt blocks its event loop.

        The blocking attempt is reported as timed out, and the other attempts are requeued.

        Args:
            store: store that is open in the watchdog's thread.
            blocking: the attempt that blocks the loop. None if unknown; then the parent requeues
                all attempts.
            where: location of the blocking code.
        """
        if blocking is None or blocking.ending is not None:
            # the parent requeues the attempts under way, to be run one by one
            self._end(f"something blocked its event loop: {where}")
            return
        ending = blocking.timed_out(f" and blocked its event loop: {where}")
        log.warning("attempt %s: %s", blocking.attempt_id, ending.message)
        await blocking.finish(ending, store)
        message = f"stopped: another attempt blocked the event loop: {where}"
        stopped = STOPPED._replace(message=message)
        await asyncio.gather(*(x.finish(stopped, store) for x in self._runner.attempts))
        self._end(None)

    def _warn(self, name: str, where: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "attempt %s has blocked its event loop for %g s: %s. %d others wait for it: await "
                "there instead, or make the app a plain function (`def`), which gets a thread",
                *(name, self._timings.blocked_warning_s, where, len(self._runner.attempts) - 1),
            )
