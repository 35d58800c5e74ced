"""The thread that writes to a SQLite store: what waits together is committed together.

Many coroutines write at once; one transaction for all of them costs little more than one for each
of them. A transaction stays short (other processes wait for the same lock): it takes a limited
amount of work, and stops early when its time is up. Neighbouring jobs of one kind become one call,
so that a hundred small writes are a handful of SQL statements: each statement gives up the
interpreter lock, and in a busy process getting it back can take 5 ms.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from lightspan.errors import StoreClosedError, StoreError
from lightspan.stores import _sqlite_file

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[Sequence[T]], list[R]]
"""Writes items inside a transaction and answers for each. Runs again if the transaction fails."""

GROUP_COST: Final = 256
"""About how much work one transaction takes: items, plus 4 kB pages of data."""
_TRANSACTION_S: Final = 0.004
_BREATH_S: Final = 0.0001
"""Between two transactions when there is more to do, so that another process gets the lock."""


class _Job:
    """Items to write, and who waits for the answers."""

    def __init__(self, work: Work[Any, Any], items: Sequence[Any], cost: int) -> None:
        self.work = work
        self.items = items
        self.cost = cost
        self.future: Future[list[Any]] = Future()


class Writer:
    """One thread and its connection. `on_commit` is called in the thread after each transaction."""

    def __init__(
        self,
        db: sqlite3.Connection,
        path: Path,
        on_begin: Callable[[], None],
        on_commit: Callable[[], None],
    ) -> None:
        self._db = db
        self._path = path
        self._on_begin = on_begin
        self._on_commit = on_commit
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lightspan-store", daemon=True)
        self._thread.start()

    def submit(self, work: Work[T, R], items: Sequence[T], cost: int) -> Future[list[R]]:
        """Write the items; the future has their answers once they are committed."""
        job = _Job(work, items, cost)
        with self._lock:
            if self._closed:
                raise StoreClosedError
            self._jobs.put(job)
        return cast("Future[list[R]]", job.future)

    def stop(self) -> None:
        """Write what was submitted, then end the thread and close the connection."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            jobs = [job for job in self._take() if job.future.set_running_or_notify_cancel()]
            while jobs:
                jobs = jobs[self._commit(jobs) :]
                if jobs or self._jobs.qsize() > 1:
                    time.sleep(_BREATH_S)
        self._db.close()

    def _take(self) -> list[_Job]:
        """The next job, and those that wait behind it, up to a limit."""
        jobs: list[_Job] = []
        cost = 0
        while cost < GROUP_COST:
            try:
                job = self._jobs.get(block=not jobs)
            except queue.Empty:
                break
            if job is None:
                self._stopping = True
                break
            jobs.append(job)
            cost += job.cost
        return jobs

    def _commit(self, jobs: Sequence[_Job]) -> int:
        """Write the first of these jobs together; returns how many. Answers their futures."""
        try:
            answers = self._transaction(jobs)
        except BaseException as error:
            if len(jobs) == 1:
                jobs[0].future.set_exception(self._explained(error))
            else:  # one of them is to blame, perhaps: the others must not pay for it
                for job in jobs:
                    self._commit([job])
            return len(jobs)
        self._on_commit()
        for job, answer in zip(jobs, answers, strict=False):
            job.future.set_result(answer)
        return len(answers)

    def _transaction(self, jobs: Sequence[_Job]) -> list[list[Any]]:
        answers: list[list[Any]] = []
        _sqlite_file.begin(self._db)
        end = time.monotonic() + _TRANSACTION_S
        try:
            self._on_begin()
            for work, same in groupby(jobs, key=lambda job: job.work):
                answers += _together(work, list(same))
                if time.monotonic() > end:
                    break
            self._db.execute("COMMIT")
        except BaseException:
            _sqlite_file.roll_back(self._db)
            raise
        return answers

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, sqlite3.Error):
            explained: StoreError = _sqlite_file.explain(error, self._path)
            explained.__cause__ = error
            return explained
        return error


def _together(work: Work[Any, Any], jobs: Sequence[_Job]) -> list[list[Any]]:
    """The answers of each of several jobs of one kind, done as one."""
    answers = iter(work([item for job in jobs for item in job.items]))
    return [[next(answers) for _ in job.items] for job in jobs]
