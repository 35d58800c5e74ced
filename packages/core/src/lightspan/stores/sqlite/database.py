"""An open SQLite store: its writer and its reader, each with a connection.

The writes that an event loop submits in one turn form a group. A group is written in one
transaction, which costs little more than a single write. The event loop's own thread writes a
group, because handing it to another thread would cost more. The writer's thread writes it instead

- if the group is large,
- while the writer's thread has other work,
- while another process holds the lock, and
- if every commit waits for the disk.

The writer's thread also moves the write-ahead log into the file, which waits for the disk too.

The number of statements is kept low: each releases the GIL, and in a busy process acquiring the GIL
again can take 5 ms.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, cast
from weakref import WeakSet

from lightspan.errors import StoreClosedError, StoreError
from lightspan.stores._sql.connections import OpenDatabase
from lightspan.stores._sql.group_commit import Committer, Job, Work, first_jobs, resolve, run_jobs
from lightspan.stores.sqlite import file
from lightspan.stores.sqlite.tables import SQLiteReadTables, SQLiteWriteTables
from lightspan.stores.timings import StoreTimings

T = TypeVar("T")
R = TypeVar("R")

_SMALL_COST: Final = 16
"""Maximum cost of a group that is written in the event loop's thread. It takes about 0.2 ms."""
_YIELD_S: Final = 0.0001
"""Seconds that a busy writer sleeps between two transactions, so that another process gets the
lock."""
_PAGES_PER_TRANSACTION: Final = 3
"""Approximate number of pages that a transaction changes, besides the pages of its items."""


class SQLiteDatabase(OpenDatabase, Committer):
    """The two connections of a SQLite store in one process, and their threads.

    The writer's connection is used by its thread or by event loops, one at a time.
    """

    def __init__(
        self,
        path: Path,
        power_loss: bool,
        clock: Callable[[], float],
        on_move: Callable[[], None],
        timings: StoreTimings,
    ) -> None:
        self._path = path
        self._timings = timings
        self._on_move = on_move
        SQLiteReader.let_write(path)
        self._db = file.connect(path, timings.busy_timeout_s, power_loss=power_loss)
        try:
            self._reader_db = file.connect(path, timings.busy_timeout_s, read_only=True)
        except BaseException:
            self._db.close()
            raise
        self.tables = SQLiteWriteTables(self._db, clock)
        reader = SQLiteReadTables(self._reader_db, clock)
        OpenDatabase.__init__(self, self.tables, self.tables, reader)
        Committer.__init__(self)
        self._inode = file.inode(path)
        self._writes_in_loop = not power_loss
        self._db_lock = threading.Lock()
        """Lock of the writer's connection, held by the thread that uses it."""
        self._log_pages = 0
        self._lock = threading.Lock()
        """Guards the fields below. A thread must not hold it while it waits for `_db_lock`."""
        self._groups: dict[asyncio.AbstractEventLoop, list[Job]] = {}
        """Jobs that each event loop has submitted in its current turn."""
        self._pending = 0
        """Number of jobs that the writer's thread has not finished."""
        self._closed = False
        file.disable_checkpoints(self._db)
        self._thread = threading.Thread(target=self._run, name="lightspan-store", daemon=True)
        self._thread.start()

    def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> asyncio.Future[list[R]]:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise StoreClosedError
            job = Job(work, items, cost, loop)
            group = self._groups.setdefault(loop, [])
            group.append(job)
            if len(group) == 1:  # other tasks that are ready may add to the group first
                loop.call_soon(self._flush, loop)
        return cast("asyncio.Future[list[R]]", job.future)

    def _query(self, query: Callable[[], R]) -> R:
        return _explained(query, self._path, self._timings)

    def stop(self) -> None:
        self._read_thread.shutdown()
        self._reader_db.close()
        with self._lock:
            self._closed = True
            for group in self._groups.values():
                self._hand_over(group)
            self._groups.clear()
            self._queue.put(None)
        self._thread.join()

    # --- in an event loop's thread --------------------------------------------------------
    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            group = self._groups.pop(loop, [])
            can_write = (
                self._writes_in_loop
                and not self._pending
                and self._log_pages <= self._timings.max_log_pages  # else the thread will move it
                and sum(job.cost for job in group) <= _SMALL_COST
            )
            answers = self._write_in_loop(group) if can_write else []
            if len(answers) < len(group) or self._log_pages > self._timings.max_log_pages:
                self._hand_over(group[len(answers) :])
        resolve(zip(group, answers, strict=False))

    def _hand_over(self, group: list[Job]) -> None:
        self._pending += len(group)
        self._queue.put(group)

    def _write_in_loop(self, group: Sequence[Job]) -> list[list[Any]]:
        """Write the first jobs in this thread, as many as fit a transaction; return their results.

        The result is empty if the lock is taken or a job fails. The caller then hands the jobs to
        the writer's thread.
        """
        if not self._db_lock.acquire(blocking=False):
            return []
        try:
            return self._transaction(group) if file.try_begin(self._db) else []
        except Exception:  # the writer's thread tries each job by itself and explains its error
            return []
        finally:
            self._db_lock.release()

    # --- in the writer's thread -----------------------------------------------------------
    def _run(self) -> None:
        is_open = True
        while is_open:
            jobs, is_open = self._dequeue()
            while jobs:
                jobs = jobs[self._commit(first_jobs(jobs)) :]
                if jobs or not self._queue.empty():
                    time.sleep(_YIELD_S)
            if self._log_pages > self._timings.max_log_pages:
                with self._db_lock:
                    self._log_pages = 0
                    file.checkpoint(self._db)
        self._db.close()

    def _on_done(self, number: int) -> None:
        with self._lock:
            self._pending -= number

    def _write(self, jobs: Sequence[Job]) -> list[list[Any]]:
        with self._db_lock:
            file.begin(self._db, self._timings.busy_timeout_s)
            return self._transaction(jobs)

    # --- in the thread that holds `_db_lock` ----------------------------------------------
    def _transaction(self, jobs: Sequence[Job]) -> list[list[Any]]:
        """Run and commit the first jobs, as many as fit one transaction; return their results."""
        changes = self._db.total_changes
        try:
            if file.inode(self._path) != self._inode:  # SQLite would go on with the old file
                raise StoreError(f"{self._path} was moved or deleted while in use: put it back")
            self.tables.begin()
            answers = run_jobs(jobs)
            self._db.execute("COMMIT")
        except BaseException:
            file.roll_back(self._db)
            raise
        if self._db.total_changes > changes:
            self._log_pages += _PAGES_PER_TRANSACTION + 2 * sum(job.cost for job in jobs)
        if self.tables.moved:
            self._on_move()
        return answers

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(error, Exception) and file.is_low_level(error):
            explained = file.explain(error, self._path)
            explained.__cause__ = error
            return explained
        return error


class SQLiteReader(OpenDatabase):
    """The connection of a SQLite store that this process must not change.

    A process that opens the file for writing adds files to its folder, and the last one removes
    them. This connection does not notice that, so it is made anew when those files have changed.
    """

    _all: ClassVar[WeakSet[SQLiteReader]] = WeakSet()
    _written: ClassVar[set[Path]] = set()
    """Files that this process has opened for writing."""

    def __init__(self, path: Path, clock: Callable[[], float], timings: StoreTimings) -> None:
        self._path = path.resolve()
        self._timings = timings
        self._lock = threading.Lock()
        """Guards the connection."""
        with self._lock:
            self._all.add(self)
            self._files = file.files_of(path)
            self._db = self._connect()
        self._tables = SQLiteReadTables(self._db, clock)
        unused = SQLiteWriteTables(self._db, clock)  # `SQLStore` refuses to write
        super().__init__(unused, unused, self._tables)

    @classmethod
    def let_write(cls, path: Path) -> None:
        """Prepare for this process's own connections that write to a file.

        They would share the readers' read-only map of the log's index, so these are closed.
        """
        cls._written.add(path.resolve())
        for reader in list(cls._all):
            if reader._path == path.resolve():
                with reader._lock:
                    if hasattr(reader, "_db"):  # else it failed to connect
                        file.close_reader(reader._db, reader._path, reader._files)
                        reader._files = file.NO_FILES

    def _connect(self) -> sqlite3.Connection:
        timeout_s, is_written = self._timings.busy_timeout_s, self._path in self._written
        return file.connect_to_read(self._path, self._files, timeout_s, is_written=is_written)

    def write(self, work: Work[T, R], items: Sequence[T], cost: int) -> Awaitable[list[R]]:
        raise StoreError(f"store {self._path} was opened for reading only")

    def _query(self, query: Callable[[], R]) -> R:
        with self._lock:
            while True:
                if (files := file.files_of(self._path)) != self._files:
                    file.close_reader(self._db, self._path, self._files)
                    self._files = files
                    self._db = self._connect()
                    self._tables.use(self._db)
                result = _explained(query, self._path, self._timings)
                # Without a lock, a query may have read pages that a new writer was changing.
                if file.files_of(self._path) == self._files:
                    return result

    def stop(self) -> None:
        self._read_thread.shutdown()
        self._all.discard(self)
        file.close_reader(self._db, self._path, self._files)


def _explained(query: Callable[[], R], path: Path, timings: StoreTimings) -> R:
    try:
        return file.retry_while_busy(query, timings.busy_timeout_s)
    except Exception as error:
        if not file.is_low_level(error):
            raise
        raise file.explain(error, path) from error
