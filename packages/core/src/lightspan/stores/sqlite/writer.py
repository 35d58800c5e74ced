"""Who writes to a SQLite store: what arrives together is committed together.

Many coroutines write at once; one transaction for all of them costs little more than one for each
of them. What an event loop's tasks submit in one turn of the loop is one group. A small group is
written in the loop's own thread: handing it over would cost more than writing it. A larger group
goes to a thread, and so does a small one while that thread has work, while another process holds
the lock, after a write here waited long, and where every commit waits for the disk. The thread
also moves the write-ahead log into the file, which waits for the disk too.

A task that writes again, with no other task's write in between, is taken to be the only one that
writes: its small writes wait for no group and no turn of the loop, but for one in `_AT_ONCE`.

What a transaction takes, `_sql.jobs` says. Few statements count here: each gives up the interpreter
lock, and in a busy process getting it back can take 5 ms.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from lightspan.errors import StoreClosedError, StoreError
from lightspan.schema import clock
from lightspan.stores._sql.jobs import (
    Committer,
    Job,
    Work,
    Write,
    answers_of,
    first_jobs,
    tell,
)
from lightspan.stores.sqlite import file

if sys.platform == "linux":
    import resource

T = TypeVar("T")
R = TypeVar("R")

SMALL_COST: Final = 16
"""A group up to this is written in the event loop's thread: about 0.2 ms."""
_AT_ONCE: Final = 8
"""Of so many writes that one task makes in succession, one lets the event loop turn."""
_LONG_S: Final = 0.01
"""A small write that waited longer met a busy interpreter lock or a slow disk."""
_PAUSE: Final = 20.0
"""How many times as long the thread does the small writes after that."""
_BREATH_S: Final = 0.0001
"""Between two transactions when there is more to do, so that another process gets the lock."""
_LOG_PAGES: Final = 4000
"""How far the log grows before it is moved into the file, about. SQLite's default is 1000; pages
that change often are moved less often this way, for 16 MB beside the file."""
_PAGES: Final = 3
"""About how many pages a transaction changes beside those of its items."""


class Writer(Committer):
    """One connection, used by a thread of its own or by the event loops, one at a time.

    Args:
        db: the connection; `stop` closes it.
        path: the file, for errors.
        on_begin: called in each transaction before its work.
        on_commit: called after each transaction, in the thread that wrote.
        on_rollback: called after each one that was undone.
        small_here: write small groups in the event loop's thread.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        path: Path,
        on_begin: Callable[[], None],
        on_commit: Callable[[], None],
        on_rollback: Callable[[], None],
        *,
        small_here: bool = True,
    ) -> None:
        super().__init__()
        self._db = db
        self._path = path
        self._on_begin = on_begin
        self._on_commit = on_commit
        self._on_rollback = on_rollback
        self._turn = threading.Lock()
        """Whoever holds it uses the connection."""
        self._log_pages = 0
        self._lock = threading.Lock()
        """Guards what is below; whoever waits for `_turn` does not hold it."""
        self._groups: dict[asyncio.AbstractEventLoop, list[Job]] = {}
        """What each event loop has submitted in its present turn."""
        self._unanswered = 0
        """Jobs that were handed to the thread and are not answered yet."""
        self._here_from = 0.0 if small_here else float("inf")
        """The monotonic time from which on small groups are written in an event loop's thread."""
        self._watchful = False
        """A write in an event loop's thread took long: see from now on whether it waits."""
        self._latest: weakref.ref[asyncio.Task[Any]] | None = None
        """The task that submitted last."""
        self._in_succession = 0
        """How many writes it made before."""
        self._closed = False
        file.keep_log(db)
        self._thread = threading.Thread(target=self._run, name="lightspan-store", daemon=True)
        self._thread.start()

    async def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> list[R]:
        """Write the items; returns their answers once they are committed.

        Raises `StoreClosedError`.
        """
        task = asyncio.current_task()
        with self._lock:
            if self._closed:
                raise StoreClosedError
            at_once = self._is_alone(task, cost)
            answers = self._write_here([Write(work, items, cost)]) if at_once else []
        return answers[0] if answers else await self.submit(work, items, cost)

    def _is_alone(self, task: asyncio.Task[Any] | None, cost: int) -> bool:
        """True if nobody else is likely to write with this task. Counts its writes."""
        latest = self._latest and self._latest()
        if task is None or task is not latest:
            self._latest = None if task is None else weakref.ref(task)
            self._in_succession = 0
            return False
        self._in_succession += 1
        return (
            self._in_succession % _AT_ONCE != 0
            and cost <= SMALL_COST
            and not self._groups
            and self._can_write_here()
        )

    def submit(self, work: Work[T, R], items: Sequence[T], cost: int) -> asyncio.Future[list[R]]:
        """Write the items with what else is submitted in this turn of the running event loop; the
        future has their answers once they are committed. Raises `StoreClosedError`.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise StoreClosedError
            job = Job(work, items, cost, loop)
            group = self._groups.setdefault(loop, [])
            group.append(job)
            if len(group) == 1:  # tasks that are ready to run may add to it first
                loop.call_soon(self._flush, loop)
        return cast("asyncio.Future[list[R]]", job.future)

    def stop(self) -> None:
        """Write what was submitted, then end the thread and close the connection."""
        with self._lock:
            self._closed = True
            for group in self._groups.values():
                self._hand_over(group)
            self._groups.clear()
            self._handed.put(None)
        self._thread.join()

    # --- in an event loop's thread --------------------------------------------------------
    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            group = self._groups.pop(loop, [])
            answers = self._write_here(group) if self._is_small(group) else []
            if len(answers) < len(group) or self._log_pages > _LOG_PAGES:
                self._hand_over(group[len(answers) :])
        tell(zip(group, answers, strict=False))

    def _is_small(self, group: Sequence[Job]) -> bool:
        return self._can_write_here() and sum(job.cost for job in group) <= SMALL_COST

    def _can_write_here(self) -> bool:
        """False where something waits for the thread, which may be the log."""
        return self._unanswered == 0 and self._log_pages <= _LOG_PAGES

    def _hand_over(self, group: list[Job]) -> None:
        self._unanswered += len(group)
        self._handed.put(group)

    def _write_here(self, group: Sequence[Write]) -> list[list[Any]]:
        """The answers of the first jobs; the rest is for the thread."""
        begun = clock.monotonic()
        if begun < self._here_from or not self._turn.acquire(blocking=False):
            return []
        waits = _waits() if self._watchful else -1
        try:
            return self._transaction(group) if file.begin_now(self._db) else []
        except Exception:  # the thread tries each job by itself, and explains what goes wrong
            return []
        finally:
            self._turn.release()
            taken = clock.monotonic() - begun
            if taken > _LONG_S:
                if self._watchful and _waits() != waits:
                    self._here_from = begun + taken * (1 + _PAUSE)
                self._watchful = True

    # --- in the writer's thread -----------------------------------------------------------
    def _run(self) -> None:
        going = True
        while going:
            jobs, going = self._take()
            while jobs:
                jobs = jobs[self._commit(first_jobs(jobs)) :]
                if jobs or not self._handed.empty():
                    time.sleep(_BREATH_S)
            if self._log_pages > _LOG_PAGES:
                with self._turn:
                    self._log_pages = 0
                    file.shorten_log(self._db)
        self._db.close()

    def _settled(self, number: int) -> None:
        with self._lock:
            self._unanswered -= number

    def _write(self, jobs: Sequence[Job]) -> list[list[Any]]:
        with self._turn:
            file.begin(self._db)
            return self._transaction(jobs)

    # --- in the thread that has the turn --------------------------------------------------
    def _transaction(self, jobs: Sequence[Write]) -> list[list[Any]]:
        """Write the first jobs, and commit, in a transaction just begun; returns their answers."""
        changes = self._db.total_changes
        try:
            self._on_begin()
            answers = answers_of(jobs)
            self._db.execute("COMMIT")
        except BaseException:
            file.roll_back(self._db)
            self._on_rollback()
            raise
        if self._db.total_changes > changes:
            self._log_pages += _PAGES + 2 * sum(job.cost for job in jobs)
        self._on_commit()
        return answers

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, Exception) and file.is_low_level(error):
            explained: StoreError = file.explain(error, self._path)
            explained.__cause__ = error
            return explained
        return error


def _waits() -> float:
    """How often this thread has given up its processor, to wait for something.

    That tells a write that waited (for the interpreter lock, for the disk) from one that another
    process kept from running: no thread would help that one. Where only Linux counts, all are
    taken to wait.
    """
    if sys.platform != "linux":
        return float("nan")
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
