"""Who writes to a PostgreSQL store: a lane is a connection, and the thread that commits with it.

A transaction that was lost with its connection is written again on a new one: what is written goes
by ids that the caller made, so writing it twice changes nothing. Claims make ids themselves; a lost
transaction that began attempts is looked for first. Nothing else in the store depends on who asked
how often, but that a policy's version may be passed over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from psycopg import errors

from lightspan.errors import StoreClosedError
from lightspan.stores._sql.group_commit import Committer, Job, Work, first_jobs, run_jobs
from lightspan_cluster.postgres.server import OUT_OF_REACH_S, Patience, is_lost, is_low_level
from lightspan_cluster.postgres.tables import PostgresWriteTables

T = TypeVar("T")
R = TypeVar("R")


class _Sent(NamedTuple):
    """A transaction whose commit was sent and not answered."""

    begun: list[str]
    answers: list[list[Any]]


class WriterThread(Committer):
    """Commits what is submitted, from the event loops of any threads.

    Args:
        tables: what is written to; `stop` closes their link.
        on_move: called after each transaction that changed the status of a rollout.
        moves: rollouts and attempts move here, which is done one at a time.
    """

    def __init__(
        self, tables: PostgresWriteTables, on_move: Callable[[], None], *, moves: bool
    ) -> None:
        super().__init__()
        self._tables = tables
        self._on_move = on_move
        self._moves = moves
        self._lock = threading.Lock()
        self._closed = False
        self._sent: _Sent | None = None
        self._is_away = False
        """The server was waited for in vain: nobody else has to wait as long."""
        name = f"lightspan-store-{'move' if moves else 'add'}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work[T, R], items: Sequence[T], cost: int) -> asyncio.Future[list[R]]:
        """Write the items with whatever else waits; the future has their answers once they are
        committed. Raises `StoreClosedError`."""
        job = Job(work, items, cost, asyncio.get_running_loop())
        with self._lock:
            if self._closed:
                raise StoreClosedError
            self._queue.put([job])
        return cast("asyncio.Future[list[R]]", job.future)

    def stop(self) -> None:
        """Write what was submitted, then end the thread and close the connection."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        going = True
        while going:
            jobs, going = self._dequeue()
            while jobs:
                jobs = jobs[self._commit(first_jobs(jobs)) :]
        self._tables.link.close()

    def _on_done(self, number: int) -> None:
        """Nobody asks how many are left."""

    def _write(self, jobs: Sequence[Job]) -> list[list[Any]]:
        patience = Patience(0.0 if self._is_away else OUT_OF_REACH_S)
        to_move = self._moves
        self._sent = None
        while True:
            try:
                answers = self._transaction(jobs, to_move=to_move)
            except BaseException as error:
                may_try = self._tables.link.recover(error, patience)
                if isinstance(error, errors.LockNotAvailable) and not to_move:
                    to_move = True  # somebody moves one of the attempts: take turns
                elif not may_try:
                    self._is_away = is_lost(error)
                    raise
            else:
                self._is_away = False
                if self._tables.moved:
                    self._on_move()
                return answers

    def _transaction(self, jobs: Sequence[Job], *, to_move: bool) -> list[list[Any]]:
        tables = self._tables
        tables.begin(to_move=to_move)
        # From here on a lost transaction is over: it had the lock that this one has now.
        sent = self._sent
        if sent is not None and sent.begun and tables.attempts_by_id(sent.begun):
            tables.link.db.rollback()
            tables.moved = True
            return sent.answers
        self._sent = None
        answers = run_jobs(jobs)
        self._sent = _Sent(tables.begun, answers)
        tables.commit()
        return answers

    def _may_be_one_jobs(self, error: BaseException) -> bool:
        return not is_lost(error)

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(error, Exception) and is_low_level(error):
            explained = self._tables.link.server.explain(error)
            explained.__cause__ = error
            return explained
        return error
