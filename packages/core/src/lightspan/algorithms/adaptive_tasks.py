"""Adaptive tasks: draw the tasks whose groups are likely to change the weights.

A group whose returns are all the same has no gradient and costs as much as any other. So the
success rate of each task is estimated from its groups, and tasks are drawn whose rate is close to a
target (MoPPS, arXiv 2507.04632; BOTS, arXiv 2510.26374). With n the number of steps since the last
group of a task, its success rate has the posterior

    Beta(a + DECAY^n · successes, b + DECAY^n · failures)

When a group ends, its successes and failures are added to the decayed numbers. The prior Beta(a, b)
is that of a task without a group. It is estimated from the first group of each task, because later
groups are of tasks that were chosen: with m the mean share of successes and q the mean share of
pairs of rollouts that both succeed, these are E[p] and E[p²] (the method of moments for the
beta-binomial distribution), so

    a = m · c,  b = (1 - m) · c,  c = (m - q) / (q - m²), at least 0.1 and at most 2

Counted as one more group is the uniform prior (m = 1/2, q = 1/3, c = 2), with which a run begins.
For each new set of tasks, one rate per task is sampled from its posterior, and tasks are drawn in
the order of the distance of this rate from `TARGET`.

What differs from the publications:

- Every `FLOOR_EVERY`-th draw takes the task that was drawn longest ago, whatever its rate. So among
  any `FLOOR_EVERY` · N consecutive draws each of N tasks is drawn at least once. (Such a window has
  N draws of this kind; each of them removes one task from those that were drawn longer ago than a
  given task, of which there are fewer than N.) Neither publication has such a floor.
- MoPPS decays the numbers of a task only when its next group ends, and BOTS those of all tasks at
  each step, which is the rule here. BOTS also infers rates of tasks that were not drawn; that is
  not done here. MoPPS draws from a random part of the tasks, here from all. Both have fixed priors.
- Rewards need not be 0 or 1. A return counts as a success of (return - lowest) / (highest - lowest)
  and as a failure of the rest, by the lowest and highest return of the run so far. A group without
  a gradient counts as failures only if its mean is below one half on this scale, else as successes
  only: equal returns of one half teach nothing, and a rate of one half would promise the opposite.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from lightspan.lightning.episode import Episode
from lightspan.schema.records import Json, task_id

UNIFORM: Final = (1.0, 1 / 2, 1 / 3)
"""The uniform prior as a group: 1, mean share of successes, mean share of pairs of successes."""
SIZES: Final = (0.1, 2.0)
"""Least and largest sum of both parameters of the prior."""
TARGET: Final = 0.5
"""Success rate whose tasks are drawn first. A group of such a task differs most often."""
FLOOR_EVERY: Final = 4
"""A draw whose number is a multiple of this takes the task that was drawn longest ago."""
DECAY: Final = 0.95
"""Factor per step by which earlier successes and failures count less."""
DESCRIPTION: Final = f"tasks='adaptive': each of N tasks occurs in any {FLOOR_EVERY} N draws"
"""Description of the setting for the output of `fit` and `dev`."""


class ReturnRange(msgspec.Struct):
    """The lowest and highest return (total reward) of a run so far."""

    ends: list[float] = []
    """The lowest and the highest; empty before the first return."""

    def add(self, returns: Iterable[float]) -> None:
        """Extend the range by `returns`."""
        values = sorted([*self.ends, *returns])
        self.ends = values[:1] + values[-1:]

    def scale(self, value: float) -> float:
        """Return `value` on a scale from 0, the lowest return, to 1, the highest.

        While all returns are equal, the lowest is taken to be 0 if they are above 0; else the
        result is 0.
        """
        low, high = self.ends or (0.0, 0.0)
        low = low if low < high else min(low, 0.0)
        return (value - low) / (high - low) if low < high else 0.0


class GroupReturns(NamedTuple):
    """A group of rollouts that has ended."""

    task_id: str
    episodes: Sequence[Episode]
    returns: Sequence[float]
    """Returns of the rollouts that count in the statistics; empty if none does."""
    has_gradient: bool
    """Whether the group changes the weights: its returns, or its failed tries, differ."""


class TaskRecord(msgspec.Struct, array_like=True):
    """What is known of one task."""

    successes: float = 0.0
    failures: float = 0.0
    step: int = 0
    """Step for which `successes` and `failures` hold; later steps decay them."""
    last_draw: int = -1
    """Number of the last draw that took the task; -1 before the first."""
    draws: int = 0
    groups: int = 0
    """Number of its groups that have ended."""


class TaskRates(msgspec.Struct):
    """Posteriors of the success rates of tasks, which a checkpoint contains."""

    step: int = 0
    """Number of steps whose groups were added."""
    records: dict[str, TaskRecord] = msgspec.field(default_factory=dict)
    """Task id → record, of tasks that were drawn or whose groups ended."""
    firsts: tuple[float, float, float] = UNIFORM
    """Sums over the first groups of tasks and `UNIFORM`: 1, share of successes, share of pairs of
    successes.
    """

    def record(self, name: str) -> TaskRecord:
        """Return the record of task `name`; a new one if it has none."""
        return self.records.get(name) or TaskRecord()

    def prior(self) -> tuple[float, float]:
        """Return both parameters of the Beta distribution of a task without a group."""
        count = self.firsts[0]
        mean, pairs = self.firsts[1] / count, self.firsts[2] / count
        size = (mean - pairs) / max(pairs - mean**2, 1e-9)
        size = min(max(SIZES[0], size), SIZES[1])
        return mean * size, (1 - mean) * size

    def posterior(self, name: str) -> tuple[float, float]:
        """Return both parameters of the Beta distribution of a task's success rate."""
        record, (a, b) = self.record(name), self.prior()
        factor = DECAY ** (self.step - record.step)
        return a + factor * record.successes, b + factor * record.failures

    def add(self, groups: Sequence[GroupReturns], scale: ReturnRange) -> None:
        """Add the groups of a step.

        Args:
            groups: all groups of the step.
            scale: range of the run's returns, these groups included.
        """
        self.step += 1
        for group in groups:
            shares = [scale.scale(value) for value in group.returns]
            if not group.has_gradient and shares:
                shares = [float(math.fsum(shares) / len(shares) >= 0.5)] * len(shares)
            total, size = math.fsum(shares), len(shares)
            record = self.records.setdefault(group.task_id, TaskRecord())
            factor = DECAY ** (self.step - record.step)
            record.successes = factor * record.successes + total
            record.failures = factor * record.failures + size - total
            if record.groups == 0 and size > 1:
                pairs = (total**2 - math.fsum(share**2 for share in shares)) / (size * (size - 1))
                count, means, both = self.firsts
                self.firsts = count + 1, means + total / size, both + pairs
            record.step = self.step
            record.groups += 1

    def chance_of_zero(self, names: Sequence[str], group_size: int) -> float:
        """Return the predicted share of groups without a gradient, if `names` were drawn.

        It is the mean over the tasks of the probability that all rewards of a group, each 0 or 1,
        are equal. Groups with rewards between 0 and 1 are equal less often than predicted.
        """
        chances = (chance_of_equal(*self.posterior(name), group_size) for name in names)
        return math.fsum(chances) / len(names) if names else 0.0


def chance_of_equal(a: float, b: float, size: int) -> float:
    """Return the probability that `size` draws of 0 or 1 are equal, if P(1) has Beta(a, b).

    It is E[p^size + (1 - p)^size] = B(a + size, b) / B(a, b) + B(a, b + size) / B(a, b).
    """
    return math.prod((a + i) / (a + b + i) for i in range(size)) + math.prod(
        (b + i) / (a + b + i) for i in range(size)
    )


class AdaptiveOrder:
    """An endless order of tasks, of which later tasks depend on the groups that have ended.

    Tasks with one id count as one task: they share a posterior and take turns. A task is drawn a
    second time while its group has not ended only for the floor, or if all others are drawn too; so
    fewer tasks than a step needs are repeated evenly.

    Args:
        tasks: the tasks.
        rates: function that returns the posteriors of their success rates; draws are counted there.
        seed: seed of the sampled rates. The order depends only on it, on `rates` and on the number
            of the first task, so that a resumed run draws the same tasks.
    """

    def __init__(
        self, tasks: Sequence[Json], rates: Callable[[], TaskRates], seed: int | str
    ) -> None:
        self._rates = rates
        self._seed = seed
        self._tasks: dict[str, list[Json]] = defaultdict(list)
        for task in tasks:
            self._tasks[task_id(task)].append(task)
        self.names = list(self._tasks)
        """Ids of the tasks, in a random order that decides between tasks that were never drawn."""
        random.Random(f"{seed}/names").shuffle(self.names)

    def take(self, start: int, count: int) -> list[Json]:
        """Draw `count` tasks, beginning with number `start`, counted from 0 over the whole run."""
        rng, rates = random.Random(f"{self._seed}/{start}"), self._rates()
        samples = {name: rng.betavariate(*rates.posterior(name)) for name in self.names}
        return [self._draw(rates, number, samples) for number in range(start, start + count)]

    def _draw(self, rates: TaskRates, number: int, samples: dict[str, float]) -> Json:
        def rank(name: str) -> tuple[float, float]:
            record = rates.record(name)
            if number % FLOOR_EVERY == 0:
                return record.last_draw, 0.0
            running = max(0, record.draws - record.groups)
            return running, abs(samples[name] - TARGET)

        name = min(self.names, key=rank)
        record = rates.records.setdefault(name, TaskRecord())
        place, record.last_draw, record.draws = record.draws, number, record.draws + 1
        return self._tasks[name][place % len(self._tasks[name])]
