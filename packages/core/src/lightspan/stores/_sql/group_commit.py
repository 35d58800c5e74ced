"""Writes that wait together are committed together.

One transaction for all of them costs little more than one for each. It stays short (others wait for
the same lock): it takes a limited amount of work, and stops early when its time is up. Neighbouring
jobs of one kind become one call, so that a hundred small writes are a handful of SQL statements.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any, Final, TypeVar

from lightspan.schema import clock

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[Sequence[T]], list[R]]
"""Writes items inside a transaction and answers for each. Runs again if the transaction fails."""

GROUP_COST: Final = 256
"""About how much work one transaction takes: items, plus 4 kB pages of data."""
_TRANSACTION_S: Final = 0.004


class Write:
    """Items to write."""

    __slots__ = ("cost", "items", "work")

    def __init__(self, work: Work[Any, Any], items: Sequence[Any], cost: int) -> None:
        self.work = work
        self.items = items
        self.cost = cost


class Job(Write):
    """Items to write, and who waits for the answers."""

    __slots__ = ("future", "loop")

    def __init__(
        self,
        work: Work[Any, Any],
        items: Sequence[Any],
        cost: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(work, items, cost)
        self.loop = loop
        self.future: asyncio.Future[list[Any]] = loop.create_future()


Answer = list[Any] | BaseException


class Committer(ABC):
    """Commits what is handed to it, in a thread: groups of jobs, None at the end."""

    def __init__(self) -> None:
        self._handed: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()

    @abstractmethod
    def _write(self, jobs: Sequence[Job]) -> Sequence[list[Any]]:
        """Write the first of these jobs in one transaction; returns their answers."""

    @abstractmethod
    def _explained(self, error: BaseException) -> BaseException:
        """The error for whoever waits."""

    def _is_of_one(self, error: BaseException) -> bool:
        """Whether one of several jobs is to blame, perhaps."""
        return True

    @abstractmethod
    def _settled(self, number: int) -> None:
        """Called when so many jobs are done, before they are answered."""

    def _take(self) -> tuple[list[Job], bool]:
        """The next jobs, and those that wait behind them, up to a limit; False when it is over."""
        jobs: list[Job] = []
        group = self._handed.get()
        while group is not None:
            jobs += group
            if self._handed.empty() or sum(job.cost for job in jobs) >= GROUP_COST:
                return jobs, True
            group = self._handed.get()
        return jobs, False

    def _commit(self, jobs: Sequence[Job]) -> int:
        """Write the first of these jobs together; returns how many. Answers their futures."""
        wanted = [job for job in jobs if not job.future.cancelled()]
        try:
            answers: Sequence[Answer] = self._write(wanted) if wanted else []
        except BaseException as error:
            if len(wanted) > 1 and self._is_of_one(error):  # the others must not pay for it
                return sum(self._commit([job]) for job in jobs)
            answers = [self._explained(error)] * len(wanted)
        done = len(jobs) if len(answers) == len(wanted) else jobs.index(wanted[len(answers)])
        self._settled(done)
        _tell_loops(zip(wanted, answers, strict=False))
        return done


def answers_of(jobs: Sequence[Write]) -> list[list[Any]]:
    """Do the first jobs, as many as there is time for in a transaction; returns their answers."""
    answers: list[list[Any]] = []
    end = clock.monotonic() + _TRANSACTION_S
    for same in _by_work(jobs):
        answers += _together(same)
        if len(answers) < len(jobs) and clock.monotonic() > end:
            break
    return answers


def first_jobs(jobs: Sequence[Job]) -> Sequence[Job]:
    """As many of them as fit one transaction."""
    costs = accumulate(job.cost for job in jobs)
    return jobs[: 1 + sum(cost < GROUP_COST for cost in costs)]


def tell(answered: Iterable[tuple[Job, Answer]]) -> None:
    """Answer, in the thread of the jobs' event loop."""
    for job, answer in answered:
        if job.future.done():
            continue  # cancelled: nobody waits any more
        if isinstance(answer, BaseException):
            job.future.set_exception(answer)
        else:
            job.future.set_result(answer)


def _by_work(jobs: Sequence[Write]) -> Iterable[Sequence[Write]]:
    """Neighbours of one kind."""
    if len(jobs) == 1:
        return [jobs]
    return (list(same) for _, same in groupby(jobs, key=lambda job: job.work))


def _together(jobs: Sequence[Write]) -> list[list[Any]]:
    """The answers of each of several jobs of one kind, done as one."""
    work = jobs[0].work
    if len(jobs) == 1:
        return [work(jobs[0].items)]
    answers = iter(work([item for job in jobs for item in job.items]))
    return [[next(answers) for _ in job.items] for job in jobs]


def _tell_loops(answered: Iterable[tuple[Job, Answer]]) -> None:
    """Answer from another thread: each event loop is woken once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, Answer]]] = {}
    for job, answer in answered:
        by_loop.setdefault(job.loop, []).append((job, answer))
    for loop, pairs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # it is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, pairs)
