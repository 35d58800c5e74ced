"""Who waits for work in this process: one looks at the store for all of them.

If each looked for itself, every move of any rollout would have all of them look, and every rollout
that is queued have all of them claim. With 250 idle runners a server did little else.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from typing import Final
from weakref import WeakKeyDictionary

from lightspan.schema import clock
from lightspan.stores._signal import Signal
from lightspan.stores.event_loop import within

Runs = frozenset[str] | None
"""The runs of which somebody wants work; None is any."""
Look = Callable[[Collection[Runs]], Awaitable[set[Runs]]]
"""Which of these have a queued rollout."""

LOOK_S: Final = 0.02
"""Between two looks for those who wait, at least: what moves in between is seen by one."""


class WorkWaiters:
    """Those of one store, in whatever event loops they wait."""

    def __init__(
        self,
        signal: Signal,
        look: Look,
        pause_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """
        Args:
            signal: says that something was queued, and other things.
            pause_s: seconds after which to look again although it said nothing.
        """
        self._signal = signal
        self._look = look
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, _Room] = WeakKeyDictionary()

    async def wait(self, run_ids: Sequence[str] | None, timeout_s: float) -> bool:
        """As `Store.await_work`."""
        deadline = clock.monotonic() + timeout_s
        runs = None if run_ids is None else frozenset(run_ids)
        with self._room().entered(runs) as (room, me):  # before the look: nothing is missed
            if await self._look([runs]):
                return True
            while not me.has_work and (left_s := deadline - clock.monotonic()) > 0:
                if room.leader is me:
                    await self._lead(room, me, deadline)
                else:
                    await within(left_s, me.woken)
                    me.woken.clear()
            return me.has_work

    def _room(self) -> _Room:
        loop = asyncio.get_running_loop()
        with self._lock:
            return self._rooms.setdefault(loop, _Room())

    async def _lead(self, room: _Room, me: _Waiter, deadline: float) -> None:
        """Look for all who wait here, until there is work for oneself or it is time to go."""
        with self._signal.waiter() as signalled:
            while not me.has_work and (now := clock.monotonic()) < deadline:
                await asyncio.sleep(min(room.looked + LOOK_S, deadline) - now)
                found = await self._look(room.asked())
                room.looked = clock.monotonic()
                room.wake(found)
                if not me.has_work:
                    pause_s = LOOK_S if found else self._pause_s()
                    await signalled.wait(max(0.0, min(pause_s, deadline - room.looked)))


class _Waiter:
    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.has_work = False
        self.woken = asyncio.Event()
        """There is work, or it is to lead."""


class _Room:
    """Who waits in one event loop. The leader looks for all."""

    def __init__(self) -> None:
        self.leader: _Waiter | None = None
        self.looked = -math.inf
        """When a leader did."""
        self._waiting: dict[_Waiter, None] = {}
        self._at_once = 1

    @contextmanager
    def entered(self, runs: Runs) -> Iterator[tuple[_Room, _Waiter]]:
        me = _Waiter(runs)
        self._waiting[me] = None
        self.leader = self.leader or me
        try:
            yield self, me
        finally:
            del self._waiting[me]
            if self.leader is me:  # the last that came has the longest to go
                self.leader = next(reversed(self._waiting), None)
                if self.leader is not None:
                    self.leader.woken.set()

    def asked(self) -> set[Runs]:
        return {waiter.runs for waiter in self._waiting if not waiter.has_work}

    def wake(self, found: Collection[Runs]) -> None:
        """Wake the longest waiting of those for whom there is work: one, and as long as each look
        finds some, twice as many by each. So one rollout has not everybody claim it, a thousand
        find whoever is there, and it is no matter that one who was woken is gone."""
        wanting = (w for w in self._waiting if w.runs in found and not w.has_work)
        for waiter in list(islice(wanting, self._at_once)):
            waiter.has_work = True
            waiter.woken.set()
        self._at_once = min(2 * self._at_once, len(self._waiting)) if found else 1


def with_work(asked: Collection[Runs], queued: Set[str]) -> set[Runs]:
    """Which have a queued rollout, where these runs do."""
    return {runs for runs in asked if (queued if runs is None else runs & queued)}
