"""A guard looks after a runner from a thread of its own, with its own loop and store connection.

It extends the leases, tells the parent that the process lives, and looks whether the app's loop
turns: one that is blocked runs no timeout and no neighbour. When the attempt that blocks it is past
its time limit, the guard reports it, gives its neighbours back, and ends the process, which is
replaced.

What blocks Python itself (C code that keeps the GIL) blocks the guard too: then the parent hears
nothing, and ends the process (`local`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final, Self

from lightspan.capture.context import pushed_in
from lightspan.runners.attempt import AttemptRun
from lightspan.runners.outcome import STOPPED
from lightspan.runners.runner import HEARTBEATS_PER_LEASE, Runner
from lightspan.runners.stack_location import in_words, of_frame
from lightspan.schema import clock
from lightspan.schema.spans import text_of
from lightspan.stores import open_store
from lightspan.stores.aio import use_real_clock, wait_for_event
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 0.25
"""How often a guard looks at the app's loop."""
WARN_S: Final = 10.0
"""How long an attempt may block the loop before it is warned of."""


class Guard:
    """Guards a runner; made in the thread and loop that the runner works in.

    Args:
        runner: what is guarded (`RunnerConfig.guarded`).
        store_url: where its attempts are.
        beat: called with every look, from the guard's thread.
        end: ends the process; what it is given is why, None where an app is stuck.
    """

    def __init__(
        self,
        runner: Runner,
        store_url: str,
        beat: Callable[[], None],
        end: Callable[[str | None], None],
    ) -> None:
        self._runner = runner
        self._store_url = store_url
        self._beat = beat
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._guarded = threading.get_ident()
        self._turned = True
        """Whether the loop has turned since the guard's last look."""
        self._blocked_s = 0.0
        """For how long it has not, in looks: a process that was suspended is not blocked."""
        self._warned: set[str] = set()
        self._over = asyncio.Event()
        # of the standard library, whatever policy the app has set
        self._own_loop = asyncio.SelectorEventLoop()
        use_real_clock(self._own_loop)
        self._thread = threading.Thread(target=self._run, name="lightspan-guard", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._own_loop.call_soon_threadsafe(self._over.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._own_loop) as own:
                own.run(self._work())
        except BaseException as error:
            log.exception("a runner's guard failed")
            self._end(f"its guard failed: {text_of(error)}")

    async def _work(self) -> None:
        async with open_store(self._store_url) as store:
            extending = asyncio.create_task(self._extend(store))
            while not await wait_for_event(POLL_INTERVAL_S, self._over):
                self._beat()
                await self._look(store)
                if extending.done():
                    extending.result()
            extending.cancel()
            await asyncio.gather(extending, return_exceptions=True)

    async def _extend(self, store: Store) -> None:
        while True:
            await asyncio.sleep(self._runner.config.lease_s / HEARTBEATS_PER_LEASE)
            for attempt in await self._runner.extend(store):
                self._loop.call_soon_threadsafe(attempt.abort)

    async def _look(self, store: Store) -> None:
        if self._turned:
            self._turned, self._blocked_s = False, 0.0
            self._loop.call_soon_threadsafe(self._turn)
            return
        self._blocked_s += POLL_INTERVAL_S
        frame = sys._current_frames().get(self._guarded)
        guilty = self._attempt_in(frame)
        where = in_words(list(of_frame(frame)))
        if self._is_over(guilty):
            await self._give_back(store, guilty, where)
        elif self._blocked_s >= WARN_S and guilty is not None:
            self._warn(guilty.attempt_id, where)

    def _turn(self) -> None:
        self._turned = True

    def _is_over(self, guilty: AttemptRun | None) -> bool:
        """Return whether the attempt that blocks the loop is past its limit, or any that waits
        where that one is not known."""
        waiting = [each for each in self._runner.attempts if each.ending is None]
        if not waiting or (guilty is not None and guilty.ending is not None):
            # left behind by one that is over; an app that opens may take its time
            return self._runner.claimed > 0 and self._blocked_s >= WARN_S
        now = clock.monotonic()
        asked = waiting if guilty is None else [guilty]
        is_past = any(each.deadline is not None and now >= each.deadline for each in asked)
        return is_past and self._blocked_s >= self._runner.config.grace_s

    def _attempt_in(self, frame: FrameType | None) -> AttemptRun | None:
        """Return the attempt whose app a loop of the standard library executes, in a task of its
        own or in one of the app's; the only one where there is one."""
        attempts = self._runner.attempts
        if len(attempts) == 1:
            return attempts[0]
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
            frame = frame.f_back
        acting = None if frame is None else pushed_in(frame.f_locals["self"]._context)
        return None if acting is None else self._runner.attempt(acting.scope.attempt_id)

    async def _give_back(self, store: Store, guilty: AttemptRun | None, where: str) -> None:
        """Report the guilty attempt, queue the others again, end the process."""
        if guilty is None or guilty.ending is not None:
            # those under way are queued again by the parent, to be run one by one
            self._end(f"something blocked its event loop: {where}")
            return
        ending = guilty.timed_out(f" and blocked its event loop: {where}")
        log.warning("attempt %s: %s", guilty.attempt_id, ending.message)
        await guilty.finish(ending, store)
        stopped = STOPPED._replace(
            message=f"stopped: another attempt blocked the event loop: {where}"
        )
        await asyncio.gather(*(each.finish(stopped, store) for each in self._runner.attempts))
        self._end(None)

    def _warn(self, attempt_id: str, where: str) -> None:
        if attempt_id not in self._warned:
            self._warned.add(attempt_id)
            log.warning(
                "attempt %s has blocked its event loop for %g s: %s. %d others wait for it: await "
                "there instead, or make the app a plain function (`def`), which gets a thread",
                *(attempt_id, WARN_S, where, len(self._runner.attempts) - 1),
            )
