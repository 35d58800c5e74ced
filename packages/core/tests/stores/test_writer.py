"""Writes to a SQLite file in the event loop's thread or in the writer's."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import NotFoundError, StoreClosedError
from lightspan.schema.records import RolloutStatus
from lightspan.stores._sql.group_commit import GROUP_COST
from lightspan.stores.sqlite import SQLiteStore
from lightspan.stores.timings import StoreTimings
from lightspan_testing.store_suite import make_rollout, make_span, ref, start
from lightspan_testing.wait import until


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "x.db") as store:
        yield store


def spying(store: SQLiteStore) -> list[int]:
    """Return a list to which the thread of each later transaction is added."""
    threads: list[int] = []
    tables = store._opened.tables
    begin = tables.begin

    def spy() -> None:
        threads.append(threading.get_ident())
        begin()

    tables.begin = spy  # type: ignore[method-assign]
    return threads


async def test_a_small_write_is_written_in_the_loops_thread(store: SQLiteStore) -> None:
    threads = spying(store)
    await store.enqueue([make_rollout()])
    [claim] = await store.claim("runner", 1, 60.0)
    await store.add_spans(ref(claim.attempt), [make_span(claim.attempt)])
    assert threads == [threading.get_ident()] * 3


@pytest.mark.parametrize(("items", "here"), [(16, True), (17, False)])
async def test_a_large_write_is_the_writers(store: SQLiteStore, items: int, here: bool) -> None:
    threads = spying(store)
    await store.enqueue([make_rollout(f"ro-{n}") for n in range(items)])
    assert [thread == threading.get_ident() for thread in threads] == [here]


async def test_a_long_text_is_the_writers(store: SQLiteStore) -> None:
    attempt = await start(store)
    threads = spying(store)
    await store.add_spans(ref(attempt), [make_span(attempt, attributes={"text": "x" * 70_000})])
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_what_waits_for_the_disk_is_the_writers(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "x.db", power_loss=True) as store:
        threads = spying(store)
        await store.enqueue([make_rollout()])
        assert len(threads) == 1
        assert threads[0] != threading.get_ident()


@pytest.mark.parametrize("tasks", [8, 200])
async def test_one_turn_of_the_loop_is_one_transaction(store: SQLiteStore, tasks: int) -> None:
    threads = spying(store)
    await asyncio.gather(*(store.enqueue([make_rollout(f"ro-{n}")]) for n in range(tasks)))
    assert len(threads) == 1
    assert await store.count() == {RolloutStatus.QUEUED: tasks}


async def test_a_lock_held_elsewhere_is_waited_for_in_the_writers_thread(
    store: SQLiteStore,
) -> None:
    threads = spying(store)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writing = asyncio.create_task(store.enqueue([make_rollout()]))
    await asyncio.sleep(0.01)
    assert threads == []
    other.execute("ROLLBACK")
    other.close()
    await writing
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_no_small_write_overtakes_a_large_one(store: SQLiteStore) -> None:
    order: list[str] = []

    def work(name: str) -> Callable[[Sequence[Any]], list[None]]:
        def write(items: Sequence[Any]) -> list[None]:
            order.append(name)
            return [None for _ in items]

        return write

    large = asyncio.create_task(store._write(work("large"), range(100)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    small = asyncio.create_task(store._write(work("small"), range(1)))
    await asyncio.gather(large, small)
    assert order == ["large", "small"]


async def test_the_one_to_blame_does_not_take_its_neighbours_along(store: SQLiteStore) -> None:
    attempt = await start(store)
    answers = await asyncio.gather(
        store.add_spans(ref(attempt), [make_span(attempt, 1)]),
        store.mark_damaged("at-unknown", "why"),
        store.add_spans(ref(attempt), [make_span(attempt, 2)]),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers] == [int, NotFoundError, int]
    stored = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
    assert stored == [make_span(attempt, 1), make_span(attempt, 2)]


async def test_more_than_fits_one_transaction(store: SQLiteStore) -> None:
    """Many large writes of one turn of the loop are split by cost, and all return."""
    threads = spying(store)
    writes = [store.enqueue([make_rollout(f"ro-{n}-{i}") for i in range(100)]) for n in range(20)]
    await asyncio.gather(*writes)
    assert len(threads) >= 20 * 100 // (GROUP_COST + 100)
    assert await store.count() == {RolloutStatus.QUEUED: 2000}
    assert store._opened._pending == 0


async def test_a_write_cancelled_in_time_is_not_written(store: SQLiteStore) -> None:
    writing = asyncio.create_task(store.enqueue([make_rollout("ro-1")]))
    lock = store._opened._db_lock
    lock.acquire()  # no thread can write now
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    other = asyncio.create_task(store.enqueue([make_rollout("ro-2")]))
    await asyncio.sleep(0.01)
    lock.release()
    await other
    assert [state.rollout.rollout_id for state in await store.rollouts()] == ["ro-2"]


async def test_close_writes_what_was_submitted(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "x.db")
    await store.open()
    small = asyncio.create_task(store.enqueue([make_rollout("ro-1")]))
    large = asyncio.create_task(store.enqueue([make_rollout(f"ro-{n}") for n in range(2, 100)]))
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(small, large)
    async with SQLiteStore(tmp_path / "x.db") as again:
        assert await again.count() == {RolloutStatus.QUEUED: 99}


async def test_a_closed_writer_refuses(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "x.db")
    await store.open()
    database = store._opened
    await store.close()
    with pytest.raises(StoreClosedError):
        await database.write(lambda items: [None for _ in items], [1], 1)


def test_two_event_loops_share_a_store(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "x.db")
    asyncio.run(store.open())
    failures: list[BaseException] = []

    async def work(name: str) -> None:
        for number in range(100):
            size = 1 + 20 * (number % 5 == 0)
            await store.enqueue([make_rollout(f"{name}-{number}-{i}") for i in range(size)])

    def run(name: str) -> None:
        try:
            asyncio.run(work(name))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert asyncio.run(store.count()) == {RolloutStatus.QUEUED: 3 * (80 + 20 * 21)}
    asyncio.run(store.close())


async def test_the_log_is_moved_into_the_file(tmp_path: Path) -> None:
    """Commits do not move the log (`disable_checkpoints`), the writer's thread does."""
    path = tmp_path / "x.db"
    async with SQLiteStore(path, timings=StoreTimings(max_log_pages=100)) as store:
        [automatic] = store._opened.tables._db.execute("PRAGMA wal_autocheckpoint").fetchone()
        assert automatic == 0
        threads = spying(store)
        attempt = await start(store)
        for number in range(100):
            text = {"text": "x" * 20_000}
            await store.add_spans(ref(attempt), [make_span(attempt, number, attributes=text)])
        assert threads.count(threading.get_ident()) > 50
        log = path.with_name("x.db-wal")
        async with asyncio.timeout(10):
            await until(lambda: path.stat().st_size > 1_500_000)
        assert log.stat().st_size < 1_500_000  # of about 2.7 MB that were written
