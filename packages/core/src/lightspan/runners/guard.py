"""A guard looks after a runner from a thread of its own, with its own loop and store connection.

It extends the leases, tells the parent that the process lives, and looks at the app's loop: one
that is blocked runs no timeout and no neighbour. When the attempt that blocks it is past its time
limit, the guard reports it, gives its neighbours back, and ends the process, which is replaced.
When the loop turns again before that, its neighbours get the time that they have lost (`pace`).

What blocks Python itself (C code that keeps the interpreter's lock) blocks the guard too: then the
parent hears nothing, and ends the process (`local`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Self

from lightspan.capture.scope import pushed_in
from lightspan.runners.attempt import AttemptRun
from lightspan.runners.outcome import STOPPED
from lightspan.runners.runner import BEATS_PER_LEASE, Runner
from lightspan.runners.whereabouts import in_words, of_frame
from lightspan.schema import clock
from lightspan.schema.spans import text_of
from lightspan.stores import open_store
from lightspan.stores.event_loop import keep_time, within
from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""How often a guard looks at the app's loop."""
_AWAY_S: Final = 1.0
"""From when on a guard was kept from looking: by a process that was stopped, as by Ctrl-Z, or by
something that kept Python's lock."""
_SAID_S: Final = 5.0
"""How long after a process goes on it may hear that it had been stopped: the system tells any of
its threads, and only the first one acts on it, when it gets to it."""
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
        self._looked = clock.monotonic()
        """When it did last."""
        self._away = (0.0, 0.0)
        """From when until when it was last kept from looking."""
        self._counted = 0.0
        """Until when it is known whether the process was stopped."""
        self._warned: set[str] = set()
        self._over = asyncio.Event()
        # of the standard library, whatever policy the app has set
        self._own_loop = asyncio.SelectorEventLoop()
        keep_time(self._own_loop)
        self._thread = threading.Thread(target=self._run, name="lightspan-guard", daemon=True)

    async def __aenter__(self) -> Self:
        self._looked = clock.monotonic()
        self._thread.start()
        self._handler = signal.signal(signal.SIGCONT, self._continued)
        signal.siginterrupt(signal.SIGCONT, False)
        return self

    async def __aexit__(self, *_: object) -> None:
        signal.signal(signal.SIGCONT, self._handler)
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
            while not await within(LOOK_S, self._over):
                now = clock.monotonic()
                if now - self._looked > LOOK_S + _AWAY_S:
                    self._away = (self._looked, now)  # first: `_continued` may be called now
                self._looked = now
                self._beat()
                await self._look(store)
                if extending.done():
                    extending.result()
            extending.cancel()
            await asyncio.gather(extending, return_exceptions=True)

    async def _extend(self, store: Store) -> None:
        while True:
            await asyncio.sleep(self._runner.config.lease_s / BEATS_PER_LEASE)
            for attempt in await self._runner.extend(store):
                self._loop.call_soon_threadsafe(attempt.lose)

    async def _look(self, store: Store) -> None:
        pace = self._runner.pace
        blocking = pace.blocking
        blocked_s = min(pace.now() - pace.ticked, clock.monotonic() - self._away[1])
        if blocked_s < LOOK_S:
            return
        frame = sys._current_frames().get(self._guarded)
        guilty = self._acting_in(frame)
        if guilty is not None:
            blocking.add(guilty.attempt_id)
        grace_s = self._runner.config.grace_s
        if blocked_s < min(grace_s, WARN_S):
            return
        where = in_words(list(of_frame(frame)))
        if blocked_s >= grace_s and self._is_over(guilty, blocked_s):
            await self._give_back(store, guilty, where)
        elif blocked_s >= WARN_S and guilty is not None:
            self._warn(guilty.attempt_id, where)

    def _continued(self, *_: object) -> None:
        """A signal handler: the process, if it was stopped, goes on. That was no time at all.

        Another process may say so at any time, so it was stopped only if nobody has looked for a
        while; the guard's thread may be faster than this one and have looked again, even often.
        """
        now, looked = clock.monotonic(), self._looked
        since, until = (looked, now) if now - looked > LOOK_S + _AWAY_S else self._away
        away_s = until - max(since, self._counted) - LOOK_S
        if away_s > _AWAY_S and now - until < _SAID_S:
            self._counted = now
            self._runner.pace.stopped_s += away_s

    def _is_over(self, guilty: AttemptRun | None, blocked_s: float) -> bool:
        """Whether the attempt is past its limit, or over; any that waits, where nobody is known to
        block. What blocks while nobody waits was left behind by one that is over."""
        if guilty is not None and guilty.ending is not None:
            return True
        waiting = self._waiting()
        if guilty is None and self._runner.stuck:
            return True
        if guilty is None and not waiting:  # an app that opens may take its time
            return self._runner.claimed > 0 and blocked_s >= WARN_S
        asked, now = waiting if guilty is None else [guilty], self._runner.pace.now()
        limits = [each.deadline for each in asked if each.deadline]
        return any(now >= limit + self._runner.config.grace_s for limit in limits)

    def _waiting(self) -> list[AttemptRun]:
        return [each for each in self._runner.attempts if each.ending is None]

    def _acting_in(self, frame: FrameType | None) -> AttemptRun | None:
        """The attempt whose app the loop executes, in a task of its own or in one of the app's."""
        for context in [*_contexts_of_task(self._loop), *_contexts_of_frame(frame)]:
            acting = pushed_in(context)
            attempt = None if acting is None else self._runner.attempt(acting.scope.attempt_id)
            if attempt is not None:
                return attempt
        return None

    async def _give_back(self, store: Store, guilty: AttemptRun | None, where: str) -> None:
        """Report the guilty attempt, queue the others again, end the process."""
        if guilty is not None and guilty.ending is None:
            ending = guilty.too_long(f" and blocked its event loop: {where}")
            log.warning("attempt %s: %s", guilty.ref.attempt_id, ending.message)
            await guilty.finish(ending, store)
        elif guilty is None and self._waiting() and not self._runner.stuck:
            # such as a callback of no attempt: they are tried one by one
            self._end(f"something blocked its event loop: {where}")
            return
        elif guilty is not None:
            await guilty.report_ended(store, where)
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


def _contexts_of_task(loop: asyncio.AbstractEventLoop) -> list[Any]:
    task = asyncio.current_task(loop)
    get_context = getattr(task, "get_context", None)  # since Python 3.12
    return [] if get_context is None else [get_context()]


def _contexts_of_frame(frame: FrameType | None) -> list[Any]:
    """The context of the callback that a loop of the standard library executes: a task's step is
    one too."""
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            return [frame.f_locals["self"]._context]
        frame = frame.f_back
    return []
