"""Task sampler: put tasks in shuffled epochs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from lightspan.schema.records import Json


class TaskOrder(Protocol):
    """An endless order of tasks."""

    def take(self, start: int, count: int) -> list[Json]:
        """Return `count` tasks, beginning with number `start`, counted from 0 over the run."""


class Epochs:
    """An endless order of tasks: one shuffled epoch after another, each with every task once.

    Args:
        tasks: the tasks of one epoch.
        seed: seed of the order. Each epoch derives its own seed from it, so that a resumed run gets
            the same order without repeating earlier epochs.
    """

    def __init__(self, tasks: Sequence[Json], seed: int | str) -> None:
        self.tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def take(self, start: int, count: int) -> list[Json]:
        """Return `count` tasks, beginning with number `start`, counted from 0 over all epochs."""
        return [self._at(place) for place in range(start, start + count)]

    def _at(self, place: int) -> Json:
        epoch, position = divmod(place, len(self.tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self.tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self.tasks[self._order[position]]
