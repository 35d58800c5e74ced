"""What happens to a training, one thing after the other, while it goes on."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable


class Chaos(threading.Thread):
    """Has so many things happen, one after the other, while a training goes on.

    Args:
        faults: what can happen; each does before any happens again.
        asked: how many model calls there were.
        tend: called again and again, beside what happens.
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

    def end(self) -> None:
        """The training has ended: nothing more is to happen."""
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
        """Whether there were some calls since the last: all that happens hits work under way."""
        some = self._asked() + 4
        while self._asked() < some:
            if self._over.wait(0.01):
                return False
            self._tend()
        return True
