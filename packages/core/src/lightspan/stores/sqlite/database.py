"""What an open SQLite store has: who writes, who reads, each with a connection.

Many coroutines write at once; one transaction for all of them costs little more than one for each
of them. What an event loop's tasks write in one turn of the loop is one group. A small group is
written in the loop's own thread: handing it over would cost more than writing it. A larger group
goes to a thread, and so does a small one while that thread has work, while another process holds
the lock, and where every commit waits for the disk. The thread also moves the write-ahead log into
the file, which waits for the disk too.

A task that writes again, with no other task's write in between, is taken to be the only one that
writes: its small writes wait for no group and no turn of the loop, but for one in
`_MAX_CONCURRENT`.

Few statements count here: each gives up the interpreter lock, and in a busy process getting it back
can take 5 ms.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from lightspan.errors import StoreClosedError
from lightspan.stores._sql.connections import OpenDatabase
from lightspan.stores._sql.group_commit import (
    Committer,
    Job,
    Work,
    Write,
    answers_of,
    first_jobs,
    tell,
)
from lightspan.stores.sqlite import file
from lightspan.stores.sqlite.tables import SQLiteReadTables, SQLiteWriteTables

T = TypeVar("T")
R = TypeVar("R")

SMALL_COST: Final = 16
"""A group up to this is written in the event loop's thread: about 0.2 ms."""
_MAX_CONCURRENT: Final = 8
"""Of so many writes that one task makes in succession, one lets the event loop turn."""
_YIELD_S: Final = 0.0001
"""Between two transactions when there is more to do, so that another process gets the lock."""
_LOG_PAGES: Final = 4000
"""How far the log grows before it is moved into the file, about. SQLite's default is 1000; pages
that change often are moved less often this way, for 16 MB beside the file."""
_PAGES: Final = 3
"""About how many pages a transaction changes beside those of its items."""


class SQLiteDatabase(OpenDatabase, Committer):
    """Two connections and their threads, of one process.

    The writing one is used by a thread of its own or by the event loops, one at a time.
    """

    def __init__(
        self,
        path: Path,
        power_loss: bool,
        clock: Callable[[], float],
        on_move: Callable[[], None],
    ) -> None:
        self._path = path
        self._on_move = on_move
        self._db = file.connect(path, power_loss=power_loss)
        try:
            self._reading = file.connect(path, read_only=True)
        except BaseException:
            self._db.close()
            raise
        self.tables = SQLiteWriteTables(self._db, clock)
        OpenDatabase.__init__(
            self, self.tables, self.tables, SQLiteReadTables(self._reading, clock)
        )
        Committer.__init__(self)
        self._writes_in_loop = not power_loss
        self._turn = threading.Lock()
        """Whoever holds it uses the connection."""
        self._log_pages = 0
        self._lock = threading.Lock()
        """Guards what is below; whoever waits for `_turn` does not hold it."""
        self._groups: dict[asyncio.AbstractEventLoop, list[Job]] = {}
        """What each event loop has submitted in its present turn."""
        self._unanswered = 0
        """Jobs that were handed to the thread and are not answered yet."""
        self._latest: weakref.ref[asyncio.Task[Any]] | None = None
        """The task that submitted last."""
        self._in_succession = 0
        """How many writes it made before."""
        self._closed = False
        file.keep_log(self._db)
        self._thread = threading.Thread(target=self._run, name="lightspan-store", daemon=True)
        self._thread.start()

    async def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> list[R]:
        task = asyncio.current_task()
        with self._lock:
            if self._closed:
                raise StoreClosedError
            at_once = self._is_alone(task, cost)
            answers = self._write_here([Write(work, items, cost)]) if at_once else []
        return answers[0] if answers else await self._submit(work, items, cost)

    def _is_alone(self, task: asyncio.Task[Any] | None, cost: int) -> bool:
        """Whether nobody else is likely to write with this task. Counts its writes."""
        latest = self._latest and self._latest()
        if task is None or task is not latest:
            self._latest = None if task is None else weakref.ref(task)
            self._in_succession = 0
            return False
        self._in_succession += 1
        return (
            self._in_succession % _MAX_CONCURRENT != 0
            and cost <= SMALL_COST
            and not self._groups
            and self._can_write_here()
        )

    def _submit(self, work: Work[T, R], items: Sequence[T], cost: int) -> asyncio.Future[list[R]]:
        """Write the items with what else is submitted in this turn of the running event loop."""
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

    def _query(self, query: Callable[[], R]) -> R:
        try:
            return file.patiently(query)
        except Exception as error:
            if not file.is_low_level(error):
                raise
            raise file.explain(error, self._path) from error

    def stop(self) -> None:
        self._read_thread.shutdown()
        self._reading.close()
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
            is_small = self._can_write_here() and sum(job.cost for job in group) <= SMALL_COST
            answers = self._write_here(group) if is_small else []
            if len(answers) < len(group) or self._log_pages > _LOG_PAGES:
                self._hand_over(group[len(answers) :])
        tell(zip(group, answers, strict=False))

    def _can_write_here(self) -> bool:
        """False where something waits for the thread, which may be the log."""
        return self._writes_in_loop and not self._unanswered and self._log_pages <= _LOG_PAGES

    def _hand_over(self, group: list[Job]) -> None:
        self._unanswered += len(group)
        self._handed.put(group)

    def _write_here(self, group: Sequence[Write]) -> list[list[Any]]:
        """The answers of the first jobs; the rest is for the thread."""
        if not self._turn.acquire(blocking=False):
            return []
        try:
            return self._transaction(group) if file.begin_now(self._db) else []
        except Exception:  # the thread tries each job by itself, and explains what goes wrong
            return []
        finally:
            self._turn.release()

    # --- in the writer's thread -----------------------------------------------------------
    def _run(self) -> None:
        going = True
        while going:
            jobs, going = self._take()
            while jobs:
                jobs = jobs[self._commit(first_jobs(jobs)) :]
                if jobs or not self._handed.empty():
                    time.sleep(_YIELD_S)
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
            self.tables.begin()
            answers = answers_of(jobs)
            self._db.execute("COMMIT")
        except BaseException:
            file.roll_back(self._db)
            raise
        if self._db.total_changes > changes:
            self._log_pages += _PAGES + 2 * sum(job.cost for job in jobs)
        if self.tables.moved:
            self._on_move()
        return answers

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, Exception) and file.is_low_level(error):
            explained = file.explain(error, self._path)
            explained.__cause__ = error
            return explained
        return error
