"""How many are let in at once: what is asked beyond that is told to come again, and when.

A queue that grows without end serves nobody: those at its end have given up when their turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

COME_AGAIN_S: Final = 1
"""What is told those for whom there is no room."""


class Full(Exception):
    """There is no room now."""


class Gate:
    """Lets in so many, with so much.

    Args:
        most: at once.
        most_bytes: that all of them may bring together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.inside = 0
        self.bytes = 0

    @contextmanager
    def entered(self, size: int) -> Iterator[Place]:
        """In the block, one more is inside, with so many bytes, and those that are added.

        Raises:
            Full: there is no room. Who brings more than there is room for ever is let in alone.
        """
        if self.inside >= self._most:
            raise Full(f"{self.inside} requests are under way here already")
        place = Place(self)
        place.add(size)
        self.inside += 1
        try:
            yield place
        finally:
            self.inside -= 1
            self.bytes -= place.bytes

    def take(self, size: int, own: int) -> None:
        """So many bytes more, for who has `own` already. Raises `Full`."""
        others = self.bytes - own
        if others and self.bytes + size > self._most_bytes:
            raise Full(f"requests of {self.bytes:,} bytes are under way here already")
        self.bytes += size


class Place:
    """Of one that is inside, with the bytes that it has brought."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.bytes = 0

    def add(self, size: int) -> None:
        """It brings so many more. Raises `Full`."""
        self._gate.take(size, self.bytes)
        self.bytes += size
