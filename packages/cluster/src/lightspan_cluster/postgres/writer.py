"""A writer of a PostgreSQL store: a connection, and the thread that commits with it.

If the connection is lost before a commit was acknowledged, the transaction is repeated on a new
connection. Most rows have ids from the caller, so writing them twice changes nothing. A claim, by
which a runner takes rollouts, generates the ids of new attempts. So before the writer repeats a
claim, it checks whether these attempts exist. A repeated transaction may skip a version number of a
policy.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from psycopg import errors

from lightspan.errors import StoreClosedError
from lightspan.stores._sql.group_commit import Committer, Job, Work, first_jobs, run_jobs
from lightspan_cluster.postgres.server import Retry, is_connection_lost, needs_explanation
from lightspan_cluster.postgres.tables import PostgresWriteTables

T = TypeVar("T")
R = TypeVar("R")


class _Sent(NamedTuple):
    """A transaction whose commit was sent but not acknowledged."""

    begun: list[str]
    answers: list[list[Any]]


class WriterThread(Committer):
    """A thread that writes jobs to the database; any event loop may submit a job.

    Args:
        tables: the tables to write to; `stop` closes their connection.
        on_move: called after each transaction that changed the status of a rollout.
        moves: whether jobs may add or change rollouts and attempts; False if they only add other
            rows.
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
        self._is_unreachable = False
        """Whether the last jobs waited in vain for the server. If so, the next jobs do not wait."""
        name = f"lightspan-store-{'move' if moves else 'add'}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work[T, R], items: Sequence[T], cost: int) -> asyncio.Future[list[R]]:
        """Queue items to be written; return a future for their answers.

        The future is done after the commit. Each call is a job. Jobs that are in the queue at the
        same time are committed in one transaction, up to a total cost.

        Args:
            work: function that writes the items and returns an answer per item.
            items: items of the job.
            cost: cost of the job.

        Raises:
            StoreClosedError: the store is closed.
        """
        job = Job(work, items, cost, asyncio.get_running_loop().create_future())
        with self._lock:
            if self._closed:
                raise StoreClosedError
            self._queue.put([job])
        return cast("asyncio.Future[list[R]]", job.future)

    def stop(self) -> None:
        """Write the submitted jobs, end the thread and close the connection."""
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
        """Do nothing: the number of committed jobs is not used."""

    def _write(self, jobs: Sequence[Job]) -> list[list[Any]]:
        server = self._tables.link.server
        retry = Retry(0.0 if self._is_unreachable else lambda: server.retry_s(self._closed))
        to_move = self._moves
        self._sent = None
        while True:
            try:
                answers = self._transaction(jobs, to_move=to_move)
            except BaseException as error:
                may_retry = self._tables.link.recover(error, retry)
                if isinstance(error, errors.LockNotAvailable) and not to_move:
                    to_move = True  # another transaction moves one of the attempts: wait for it
                elif not may_retry:
                    self._is_unreachable = is_connection_lost(error)
                    raise
            else:
                self._is_unreachable = False
                if self._tables.moved:
                    self._on_move()
                return answers

    def _transaction(self, jobs: Sequence[Job], *, to_move: bool) -> list[list[Any]]:
        tables = self._tables
        tables.begin(to_move=to_move)
        # A lost transaction has ended by now: it held the lock that this one holds.
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
        return not is_connection_lost(error)

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(error, Exception) and needs_explanation(error):
            explained = self._tables.link.server.explain(error)
            explained.__cause__ = error
            return explained
        return error
