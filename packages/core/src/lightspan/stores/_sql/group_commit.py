"""Commit all writes that are waiting in one transaction (group commit).

One transaction for many writes costs little more than one for a single write. A transaction is kept
short, because other processes wait for the same lock: it takes a limited amount of work and stops
early after `_TRANSACTION_S` seconds. Adjacent jobs that call the same function become one call, so
a hundred small writes take a handful of SQL statements.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Final, TypeVar

from lightspan.schema import clock

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[Sequence[T]], list[R]]
"""Function that writes items inside a transaction and returns one result per item.

It runs again if the transaction fails.
"""

GROUP_COST: Final = 256
"""Approximate cost of one transaction, in items plus 4 kB pages of data."""
_TRANSACTION_S: Final = 0.004
"""Seconds after which a transaction takes no further job."""


@dataclass(slots=True, eq=False)
class Job:
    """A list of items to write, with the future that gets their results."""

    work: Work[Any, Any]
    items: Sequence[Any]
    cost: int
    future: asyncio.Future[list[Any]]


Answer = list[Any] | BaseException
"""The results of a job, or its error."""


class Committer(ABC):
    """Base class of writers that take jobs from a queue and commit them in groups.

    The value None in the queue ends the writer.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()

    @abstractmethod
    def _write(self, jobs: Sequence[Job]) -> Sequence[list[Any]]:
        """Write the first jobs, as many as fit one transaction; return their results."""

    @abstractmethod
    def _explain(self, error: BaseException) -> BaseException:
        """Return the error to raise for `error` in the coroutines that wait for the jobs."""

    def _may_be_one_jobs(self, error: BaseException) -> bool:
        """Return whether one job of a group may have caused the error.

        If so, each job of the group is written by itself.
        """
        return True

    @abstractmethod
    def _on_done(self, number: int) -> None:
        """Count `number` jobs as done; called before their futures are resolved."""

    def _dequeue(self) -> tuple[list[Job], bool]:
        """Wait for jobs, and return about as many as fit one transaction.

        The bool is False if the thread must end after these jobs.
        """
        jobs: list[Job] = []
        group = self._queue.get()
        while group is not None:
            jobs += group
            if self._queue.empty() or sum(job.cost for job in jobs) >= GROUP_COST:
                return jobs, True
            group = self._queue.get()
        return jobs, False

    def _commit(self, jobs: Sequence[Job]) -> int:
        """Write the first jobs, as many as fit one transaction, and resolve their futures.

        Return how many jobs were done, including cancelled jobs.
        """
        pending = [job for job in jobs if not job.future.cancelled()]
        try:
            answers: Sequence[Answer] = self._write(pending) if pending else []
        except BaseException as error:
            if len(pending) > 1 and self._may_be_one_jobs(error):
                # One job's error would fail its neighbours too: write each by itself.
                return sum(self._commit([job]) for job in jobs)
            answers = [self._explain(error)] * len(pending)
        done = len(jobs) if len(answers) == len(pending) else jobs.index(pending[len(answers)])
        self._on_done(done)
        _resolve_in_loops(zip(pending, answers, strict=False))
        return done


def run_jobs(jobs: Sequence[Job]) -> list[list[Any]]:
    """Run jobs in order until `_TRANSACTION_S` seconds have passed, and return their results.

    Adjacent jobs with the same `work` run as one call. The jobs that are left did not run.
    """
    answers: list[list[Any]] = []
    end = clock.monotonic() + _TRANSACTION_S
    for _, adjacent in groupby(jobs, key=lambda job: job.work):
        together = list(adjacent)
        results = iter(together[0].work([item for job in together for item in job.items]))
        answers += [[next(results) for _ in job.items] for job in together]
        if len(answers) < len(jobs) and clock.monotonic() > end:
            break
    return answers


def first_jobs(jobs: Sequence[Job]) -> Sequence[Job]:
    """Return the first jobs, as many as fit one transaction."""
    return jobs[: 1 + sum(cost < GROUP_COST for cost in accumulate(job.cost for job in jobs))]


def resolve(answers: Iterable[tuple[Job, Answer]]) -> None:
    """Resolve the futures of jobs, in the thread of their event loop."""
    for job, answer in answers:
        if job.future.done():  # cancelled
            continue
        if isinstance(answer, BaseException):
            job.future.set_exception(answer)
        else:
            job.future.set_result(answer)


def _resolve_in_loops(answers: Iterable[tuple[Job, Answer]]) -> None:
    """Resolve the futures of jobs, each in its own event loop. Each event loop is woken once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, Answer]]] = {}
    for job, answer in answers:
        by_loop.setdefault(job.future.get_loop(), []).append((job, answer))
    for loop, pairs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits
            loop.call_soon_threadsafe(resolve, pairs)
