"""What a runner's time is: how late its loop turns, and for how long its process was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from lightspan.schema import clock

TICK_S: Final = 0.05
"""How often the loop is to tick. What blocks it for less is the pace of a busy loop."""
_LATE_S: Final = 1.0
"""By more than so much the loop is late where its process may have been stopped."""
DOUBT_S: Final = 0.5
"""How long it may take until that is known: a process hears that it goes on through any of its
threads, and the loop may be quicker."""


class Paced(Protocol):
    """An attempt as the loop's pace concerns it."""

    @property
    def attempt_id(self) -> str: ...

    def give_time(self, seconds: float) -> None:
        """A neighbour has kept the loop from it for so long."""
        ...


class Pace:
    """Ticks on an event loop; what it is late by, attempts get on top of their limits.

    Args:
        attempts: those under way.
    """

    def __init__(self, attempts: Callable[[], Iterable[Paced]]) -> None:
        self._attempts = attempts
        self._timer: asyncio.TimerHandle | None = None
        self.stopped_s = 0.0
        """For how long the process was stopped, as by Ctrl-Z, which is no time at all."""
        self.blocking: set[str] = set()
        """The attempts that were seen to execute since the last tick, while the next one was late:
        they are given nothing. Another thread adds them to the set that it found before it looked.
        """
        self.ticked = self.now()
        """When the loop last turned, by `now`."""
        self._doubtful_until = 0.0
        """By `clock.monotonic`."""

    def now(self) -> float:
        """Seconds by a clock that stands while the process is stopped; callable from any thread."""
        return clock.monotonic() - self.stopped_s

    @property
    def is_doubtful(self) -> bool:
        """Whether the loop was so late a moment ago that the process may have been stopped."""
        return clock.monotonic() < self._doubtful_until

    def start(self) -> None:
        """Begin to tick, on the loop that runs."""
        self.ticked = self.now()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Tick no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _tick(self) -> None:
        self.catch_up()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def catch_up(self) -> None:
        """Give attempts what the loop is late by. To be called in the loop, by what is due there
        too: after a block, it may be executed before the tick."""
        now, blocking, self.blocking = self.now(), self.blocking, set()
        late_s, self.ticked = now - self.ticked - TICK_S, now
        if late_s > _LATE_S:
            self._doubtful_until = clock.monotonic() + DOUBT_S
        if late_s > 0:
            for attempt in self._attempts():
                if attempt.attempt_id not in blocking:
                    attempt.give_time(late_s)
