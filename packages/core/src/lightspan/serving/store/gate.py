"""How many are let in at once: what is asked beyond that is told to come again, and when.

A queue that grows without end serves nobody: those at its end have given up when their turn comes.
Who sends slowly, or stops in between, takes no place, and no bytes that another needs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from lightspan.schema import clock

COME_AGAIN_S: Final = 1
"""What is told those for whom there is no room."""
SLOW: Final = 16_384
"""Bytes a second: who brings less has to leave first where there is no room."""
SMALL: Final = 16_384
"""Bytes for which there is always room, while there are others who bring more."""
_PACE_S: Final = 1.0
"""Of how long a stretch it is told how fast somebody is."""


class Full(Exception):
    """There is no room now."""


class Gate:
    """Lets in so many, with so much.

    Args:
        most: at once.
        most_bytes: that all of them may bring together, with those that are arriving.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._arriving: set[Place] = set()
        self.inside = 0
        self.bytes = 0

    @contextmanager
    def arriving(self, turn_away: Callable[[Full], object]) -> Iterator[Place]:
        """In the block, a request is here with the bytes that it brings (`Place.add`), which begins
        to be done by `Place.entered`. Of what a client sends each part counts when it is here: to
        count what it says that it will send would let a few who send nothing keep out everybody.

        Args:
            turn_away: ends the arriving of this one, by the error, where another needs the room.

        Raises:
            Full: there is no room.
        """
        self._check_room()
        place = Place(self, turn_away)
        self._arriving.add(place)
        try:
            yield place
        finally:
            self._arriving.discard(place)
            self.bytes -= place.bytes

    @contextmanager
    def arriving_by_task(self) -> Iterator[Place]:
        """The same of a request that the task of now reads, which raises `Full` in the block where
        it is turned away."""
        task = asyncio.current_task()
        assert task is not None
        full: list[Full] = []
        others = task.cancelling()

        def turn_away(error: Full) -> None:
            full.append(error)
            task.cancel()

        try:
            with self.arriving(turn_away) as place:
                yield place
        except asyncio.CancelledError:
            if full and task.uncancel() <= others:  # nobody else has cancelled it
                raise full[0] from None
            raise

    @contextmanager
    def begun(self, place: Place) -> Iterator[None]:
        """What `Place.entered` does."""
        self._arriving.discard(place)
        self._check_room()
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def _check_room(self) -> None:
        if self.inside >= self._most:
            raise Full(f"{self.inside} requests are under way here already")

    def take(self, place: Place, size: int) -> None:
        """So many bytes more for it. Where there is no room, others who have not all yet have to
        leave. Raises `Full`: there is nobody who has to."""
        while size > 0 and self.bytes > place.bytes and self.bytes + size > self._most_bytes:
            full = Full(f"requests of {self.bytes:,} bytes are under way here already")
            leaving = self._who_leaves(place, size)
            if leaving is None:
                raise full
            self._arriving.discard(leaving)
            self.bytes -= leaving.bytes
            leaving.bytes = 0
            leaving.turn_away(full)
        self.bytes += size
        place.bytes += size

    def _who_leaves(self, place: Place, size: int) -> Place | None:
        """Of the slow the one that has brought most. By size alone, many who stop at once would
        turn away whoever has more to send; so of those who are fast one leaves for what is small
        only, as a heartbeat is."""
        now = clock.monotonic()
        others = [other for other in self._arriving if other is not place]
        slow = [other for other in others if other.bytes and other.pace(now) < SLOW]
        wanted = place.bytes + size
        large = [other for other in others if wanted <= SMALL and other.bytes > wanted]
        return max(slow or large, key=lambda other: other.bytes, default=None)


class Place:
    """Of one request, with the bytes that it has brought."""

    def __init__(self, gate: Gate, turn_away: Callable[[Full], object]) -> None:
        self._gate = gate
        self.turn_away = turn_away
        self.bytes = 0
        self._since = clock.monotonic()
        self._bytes_then = 0
        self._pace = math.inf

    def add(self, size: int) -> None:
        """It brings so many more. Raises `Full`; one that is alone may bring any number."""
        now = clock.monotonic()
        if now - self._since >= _PACE_S:
            self._pace, self._since, self._bytes_then = self.pace(now), now, self.bytes
        self._gate.take(self, size)

    def pace(self, now: float) -> float:
        """Bytes a second, of late; infinite at first."""
        passed = now - self._since
        if passed < _PACE_S:
            return self._pace
        return (self.bytes - self._bytes_then) / passed

    def entered(self) -> AbstractContextManager[None]:
        """All of it is here: in the block, one more is inside. Raises `Full`."""
        return self._gate.begun(self)
