"""Inject faults into a training while it goes on, one after the other."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable


class Chaos(threading.Thread):
    """A thread that injects faults, one after the other, while a training goes on.

    Args:
        faults: name → function that injects the fault; each is called once before any is repeated.
        number: number of faults to inject.
        asked: function that returns the number of model calls so far.
        tend: function to call repeatedly while waiting.
        dice: random generator for order and times.
    """

    def __init__(
        self,
        faults: dict[str, Callable[[], None]],
        number: int,
        asked: Callable[[], int],
        tend: Callable[[], None],
        dice: random.Random,
    ) -> None:
        super().__init__()
        self._faults = faults
        self._number = number
        self._asked = asked
        self._tend = tend
        self._dice = dice
        self._over = threading.Event()
        self.happened: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for name in self._order():
                if not self._await_work():
                    return
                time.sleep(self._dice.uniform(0, 0.3))
                self._faults[name]()
                self.happened[name] += 1
            while not self._over.wait(0.1):
                self._tend()
        except BaseException as error:
            self.error = error

    def lags(self) -> bool:
        """Return whether there were more than eight calls per fault.

        A fast machine ends its training before the last fault unless calls wait.
        """
        happened = self.happened.total()
        waiting = self.is_alive() and happened < self._number
        return waiting and self._asked() >= 8 * (1 + happened)

    def end(self) -> None:
        """Stop after the training has ended, and raise the first error of this thread."""
        self._over.set()
        self.join()
        if self.error is not None:
            raise self.error

    def _order(self) -> list[str]:
        order: list[str] = []
        while len(order) < self._number:
            names = sorted(self._faults)
            self._dice.shuffle(names)
            order += names
        return order[: self._number]

    def _await_work(self) -> bool:
        """Wait for four more model calls, so that a fault hits work in progress.

        Returns False if the training has ended.
        """
        some = self._asked() + 4
        while self._asked() < some:
            if self._over.wait(0.01):
                return False
            self._tend()
        return True
