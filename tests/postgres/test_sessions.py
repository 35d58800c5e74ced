"""Test database sessions: connection loss, locks, notifications."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from lightspan.errors import StoreUnreachableError
from lightspan.schema.records import RolloutStatus
from lightspan.schema.spans import encode_span
from lightspan.stores import open_store
from lightspan.stores._sql.queries import named_queries
from lightspan.stores.timings import StoreTimings
from lightspan_cluster.postgres.dsn import read_address
from lightspan_cluster.postgres.server import Server
from lightspan_cluster.postgres.store import PostgresStore
from lightspan_cluster.postgres.tables import PostgresReadTables, PostgresWriteTables
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.store_suite import (
    LEASE_S,
    make_call,
    make_peer,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
)
from lightspan_testing.wait import until
from packages.core.tests.production.imports import imports_of_threads
from packages.core.tests.stores.programs import END, FORKED
from tests.postgres.cluster import Cluster

pytestmark = pytest.mark.slow

_OTHERS = b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"


def end_all(cluster: Cluster) -> int:
    """End the sessions of all stores; return how many there were."""
    with cluster.connect() as db:
        return len(db.execute(_OTHERS, ("lightspan",)).fetchall())


@pytest.fixture
def own_cluster(postgres: Path) -> Iterator[Cluster]:
    """Run a server that a test may stop."""
    with Cluster(postgres) as cluster:
        yield cluster


FILL = """
INSERT INTO rollouts SELECT n, 'ro-' || n, 'run', 0, 'train', 1, 3, 'succeeded', 0, n, 0, 1,
    'at-' || n, 0 FROM generate_series(1, 50000) n;
INSERT INTO rollout_bodies SELECT n, 'body' FROM generate_series(1, 50000) n;
INSERT INTO attempts SELECT 'at-' || n, n << 20, NULL, 'ro-' || n, 1, 1, 'succeeded', '', '', 0, 0,
    0, NULL, NULL, '', '' FROM generate_series(1, 50000) n;
ANALYZE"""


# --- what the server reads ------------------------------------------------------------------
async def test_a_page_of_a_large_store_does_not_read_every_attempt(cluster: Cluster) -> None:
    """Check the plan of `summaries` for 1,024 of 50,000 rollouts."""
    url = cluster.url("plans")
    async with PostgresStore(url):
        pass
    server = Server(read_address(url), StoreTimings())
    with server.connect() as db:
        for statement in FILL.split(";"):
            db.execute(statement.encode())
        page = "(SELECT * FROM rollouts WHERE change > 25000 ORDER BY change LIMIT 1024) rollouts"
        queries = named_queries(PostgresReadTables.package, PostgresReadTables._translate)
        query = queries["summaries"].replace("FROM rollouts", f"FROM {page}")
        plan = "\n".join(line for (line,) in db.execute(f"EXPLAIN {query}".encode()))
    assert "Seq Scan on attempts" not in plan, plan


# --- sessions that die --------------------------------------------------------------------
async def run_rollouts(store: PostgresStore, names: list[str], claimed: list[str]) -> None:
    """Run rollouts from enqueue to report, with one call and one span each; append ids to
    `claimed`.
    """
    remaining = iter(names)

    async def work() -> None:
        for name in remaining:
            await store.enqueue([make_rollout(name, run_id=name)])
            [claim] = await store.claim("runner", 1, LEASE_S, name)
            attempt = claim.attempt
            claimed.append(claim.rollout.rollout_id)
            assert await store.add_calls([make_call(attempt)]) == [False]
            assert await store.add_spans(ref(attempt), [make_span(attempt)]) == 0
            assert await store.heartbeat([ref(attempt)], LEASE_S) == []
            assert await store.report([make_report(attempt)]) == [True]

    await asyncio.gather(*(work() for _ in range(8)))


async def check_rollouts(store: PostgresStore, names: list[str]) -> None:
    """Check that the rollouts have ended, and that nothing was lost or stored twice."""
    assert await store.count() == {RolloutStatus.SUCCEEDED: len(names)}
    attempts = await store.attempts(names)
    assert [attempt.number for attempt in attempts] == [1] * len(names)
    ids = [attempt.attempt_id for attempt in attempts]
    assert {len(spans) for spans in (await store.spans(ids)).values()} == {2}
    records = await store.token_records(ids)
    assert {tuple(r.late for r in calls) for calls in records.values()} == {(False,)}


async def test_sessions_that_are_ended_cost_nothing(cluster: Cluster, url: str) -> None:
    names = [f"ro-{number}" for number in range(150)]
    claimed: list[str] = []
    ended = 0
    async with PostgresStore(url) as store, PostgresStore(url) as watcher:
        watching = asyncio.create_task(follow(watcher, len(names)))
        running = asyncio.create_task(run_rollouts(store, names, claimed))
        for number in range(10, len(names), 10):
            await until(lambda number=number: running.done() or len(claimed) >= number)
            ended += await asyncio.to_thread(end_all, cluster)
        await running
        assert sorted(claimed) == sorted(names)
        assert await watching == set(names)
        await check_rollouts(store, names)
    assert ended > 20


async def follow(store: PostgresStore, number: int) -> set[str]:
    """Watch until `number` rollouts have ended, and return their ids."""
    ended: set[str] = set()
    cursor = 0
    while len(ended) < number:
        changes = await store.watch(cursor, timeout_s=10)
        cursor = changes.cursor
        ended |= {s.rollout.rollout_id for s in changes.rollouts if s.status.final}
    return ended


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "lost"])
async def test_a_commit_without_an_answer_is_settled(
    cluster: Cluster, url: str, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """Check each write when its session dies right before or right after the commit."""
    commit = PostgresWriteTables.commit
    died: list[int] = []

    def dying(tables: PostgresWriteTables) -> None:
        db = tables.link.db
        if len(died) == len(operations_):  # the retry of this write
            commit(tables)
            return
        died.append(db.info.backend_pid)
        if committed:
            commit(tables)
        with cluster.connect() as other:
            other.execute(b"SELECT pg_terminate_backend(%s)", (db.info.backend_pid,))
        db.execute("SELECT 1") if committed else commit(tables)
        raise AssertionError("the session is still there")

    operations_: list[str] = []

    def ask(name: str) -> PostgresStore:
        operations_.append(name)
        return store

    async with PostgresStore(url) as store:
        await store.enqueue([make_rollout(), make_rollout("ro-2")])
        monkeypatch.setattr(PostgresWriteTables, "commit", dying)
        claims = await ask("claim").claim("runner", 2, LEASE_S)
        assert [claim.rollout.rollout_id for claim in claims] == ["ro-1", "ro-2"]
        first, second = (claim.attempt for claim in claims)
        assert await ask("heartbeat").heartbeat([ref(first)], LEASE_S) == []
        assert await ask("call").add_calls([make_call(first)]) == [False]
        await ask("capture_errors").mark_damaged(first.attempt_id, "reason")
        assert await ask("report").report([make_report(first)]) == [True]
        assert await ask("version").allot_version("sql") == (2 if committed else 1)
        assert await ask("cancel").cancel(["ro-2"]) == (0 if committed else 1)
        monkeypatch.undo()
        assert await store.attempts(["ro-1", "ro-2"]) == [
            await store.attempt(first.attempt_id),
            await store.attempt(second.attempt_id),
        ]
        assert (await store.attempt(first.attempt_id)).capture_errors == ["reason"]
        assert await store.count() == {RolloutStatus.SUCCEEDED: 1, RolloutStatus.CANCELLED: 1}
        assert len((await store.token_records([first.attempt_id]))[first.attempt_id]) == 1
    assert len(died) == len(operations_) == 7


async def test_a_server_that_stays_away_is_told(
    own_cluster: Cluster,
) -> None:
    timings = StoreTimings(database_retry_s=0.1)
    async with PostgresStore(own_cluster.url("x"), timings=timings) as store:
        await store.enqueue([make_rollout()])
        own_cluster.kill()
        operations: list[Callable[[], Any]] = [
            lambda: store.enqueue([make_rollout("ro-2")]),
            lambda: store.announce(make_peer("runner")),
            store.count,
        ]
        for operation in operations:
            with pytest.raises(
                StoreUnreachableError, match=r"lightspan@/postgres\?host=.*cannot be reached"
            ):
                await operation()
        # waiting jobs fail together, and later ones do not wait as long
        store._server.timings = StoreTimings(database_retry_s=3600.0)
        results = await asyncio.gather(
            *(store.enqueue([make_rollout(f"at-once-{n}")]) for n in range(300)),
            *(store.count() for _ in range(20)),
            return_exceptions=True,
        )
        assert {type(one) for one in results} == {StoreUnreachableError}
        own_cluster.start()
        for operation in operations:
            await operation()
        assert await store.count() == {RolloutStatus.QUEUED: 2}


# --- waiting for one another --------------------------------------------------------------
async def test_what_is_added_waits_for_nothing_that_moves(cluster: Cluster, url: str) -> None:
    async with PostgresStore(url) as store:
        attempt = await start(store)
        with _locking(cluster, url, "SELECT FROM ends FOR UPDATE"):
            moving = asyncio.create_task(store.enqueue([make_rollout("ro-2")]))
            assert await store.add_calls([make_call(attempt)]) == [False]
            assert await store.count() == {RolloutStatus.RUNNING: 1}
            assert not moving.done()
        await moving


async def test_a_span_that_meets_a_report_is_late(cluster: Cluster, url: str) -> None:
    """Check that a span waits for a concurrent report of its attempt, and is marked late."""
    async with PostgresStore(url) as store:
        attempt = await start(store)
        other = await start(store, "ro-2")
        move = f"""
            SELECT FROM ends FOR UPDATE;
            UPDATE attempts SET status = 'succeeded' WHERE attempt_id = '{attempt.attempt_id}'
        """
        with _locking(cluster, url, move):
            adding = asyncio.create_task(store.add_spans(ref(attempt), [make_span(attempt)]))
            call = asyncio.create_task(store.add_calls([make_call(other)]))
            with cluster.connect() as watching:
                await until(lambda: watching.execute(_WAITING).fetchone() == (1,))
            assert not adding.done()
        assert await adding == 1
        assert await call == [False]
        [span] = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert span.late


class _locking:
    """A session of another program with an open transaction."""

    def __init__(self, cluster: Cluster, url: str, statements: str) -> None:
        self._db: psycopg.Connection[Any] = cluster.connect()
        self._db.execute(f"SET search_path = {read_address(url).schema}".encode())
        self._statements = statements

    def __enter__(self) -> None:
        self._db.execute(f"BEGIN; {self._statements}".encode())

    def __exit__(self, *_: object) -> None:
        self._db.execute("COMMIT")
        self._db.close()


async def test_writers_that_wait_in_a_circle_write_all_the_same(cluster: Cluster, url: str) -> None:
    """Check a deadlock of two sessions, in which the server rolls back the store's transaction."""
    with cluster.connect() as other:
        other.execute(b"CREATE ROLE patient LOGIN SUPERUSER")
        other.execute(b"ALTER ROLE patient SET deadlock_timeout = '2s'")
        other.execute(b"SET deadlock_timeout = '1h'")  # so that the server rolls back the other one
        other.execute(f"SET search_path = {read_address(url).schema}".encode())
        async with PostgresStore(url.replace("lightspan@", "patient@")) as store:
            attempt = await start(store)
            spans = [make_span(attempt, number) for number in range(2)]
            add = """
                INSERT INTO spans (attempt, span_id, call_id, late, body)
                SELECT position, %s, '', FALSE, %s FROM attempts
            """
            rows = [(span.span_id, encode_span(span)) for span in spans]
            other.execute(b"BEGIN")
            other.execute(add.encode(), rows[1])
            adding = asyncio.create_task(store.add_spans(ref(attempt), spans))
            with cluster.connect() as watching:
                await until(lambda: watching.execute(_WAITING).fetchone() == (1,))
            await asyncio.to_thread(other.execute, add.encode(), rows[0])
            other.execute(b"COMMIT")
            assert await adding == 0
            stored = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
            assert sorted(span.span_id for span in stored) == [span.span_id for span in spans]
        other.execute(b"REASSIGN OWNED BY patient TO lightspan; DROP ROLE patient")


_WAITING = b"""
    SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'lightspan' AND wait_event_type = 'Lock'
"""


# --- hearing of one another ---------------------------------------------------------------
_COMMITTER = """
import asyncio, sys
from lightspan.schema.records import Rollout
from lightspan.stores import open_store
from lightspan.stores._sql.queries import named_queries

async def main():
    async with open_store(sys.argv[1]) as store:
        for number in range(100):
            name = f"{sys.argv[2]}-{number}"
            await store.enqueue([Rollout(rollout_id=name, task={}, task_id="task")])

asyncio.run(main())
"""


async def test_a_watcher_sees_every_change_of_four_processes(url: str) -> None:
    """Check that changes that are committed during a poll are not missed."""
    changes_read: list[int] = []
    async with open_store(url) as store:
        program = (sys.executable, "-c", _COMMITTER, url)
        committers = [
            await asyncio.create_subprocess_exec(*program, str(name)) for name in range(4)
        ]
        cursor = 0
        while len(changes_read) < 400:
            changes = await store.watch(cursor, timeout_s=60)
            assert changes.rollouts
            changes_read += [state.change for state in changes.rollouts]
            cursor = changes.cursor
        assert [await committer.wait() for committer in committers] == [0] * 4
        assert changes_read == list(range(1, 401))
        assert (await store.watch(cursor)).rollouts == []


async def test_a_watcher_is_woken_by_what_it_hears(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a notification ends the wait, which would otherwise last an hour."""
    async with PostgresStore(url) as store, PostgresStore(url) as other:
        store._polls_s = (3600.0, 3600.0)
        watching = asyncio.create_task(store.watch(0, timeout_s=3600))
        await other.enqueue([make_rollout()])
        assert [state.rollout.rollout_id for state in (await watching).rollouts] == ["ro-1"]


# --- processes ----------------------------------------------------------------------------
def test_a_store_after_a_fork(url: str) -> None:
    """Check that a forked child does not end its parent's sessions."""
    session = "store._opened.moving.link._db"
    program = FORKED.replace("child = os.fork()", f"ours = {session}\nchild = os.fork()")
    program += f"assert ours is {session}\n{END}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, url], check=True)


def test_threads_that_write_to_a_database_import_nothing(url: str) -> None:
    with ScriptedServer("Here.") as server:
        threads, *modules = imports_of_threads(server.url, LIGHTSPAN_STORE=url)
    assert int(threads) >= 2
    assert modules == []
