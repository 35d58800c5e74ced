"""Test which thread writes to a SQLite file: the event loop's or the writer's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightspan.schema.records import RolloutStatus
from lightspan.stores.sqlite import SQLiteStore
from lightspan.stores.timings import StoreTimings
from lightspan_testing.store_suite import make_rollout, make_span, ref, start
from lightspan_testing.wait import until


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "x.db") as store:
        yield store


def spying(store: SQLiteStore) -> list[int]:
    """Return a list to which each later transaction appends the id of its thread."""
    threads: list[int] = []
    tables = store._opened.tables
    begin = tables.begin

    def spy() -> None:
        threads.append(threading.get_ident())
        begin()

    tables.begin = spy  # type: ignore[method-assign]
    return threads


@pytest.mark.parametrize(
    ("items", "text", "power_loss", "here"),
    [
        (1, "", False, True),
        (16, "", False, True),
        (17, "", False, False),
        (1, "x" * 70_000, False, False),
        (1, "", True, False),  # it waits for the disk
    ],
    ids=["small", "a few", "many", "a long text", "power loss"],
)
async def test_which_thread_writes(
    tmp_path: Path, items: int, text: str, power_loss: bool, here: bool
) -> None:
    """Check that the event loop's thread makes only short writes."""
    async with SQLiteStore(tmp_path / "x.db", power_loss=power_loss) as store:
        threads = spying(store)
        await store.enqueue([make_rollout(f"ro-{n}", task=text) for n in range(items)])
    assert [thread == threading.get_ident() for thread in threads] == [here]


@pytest.mark.parametrize("tasks", [8, 200])
async def test_one_turn_of_the_loop_is_one_transaction(store: SQLiteStore, tasks: int) -> None:
    threads = spying(store)
    await asyncio.gather(*(store.enqueue([make_rollout(f"ro-{n}")]) for n in range(tasks)))
    assert len(threads) == 1
    assert await store.count() == {RolloutStatus.QUEUED: tasks}


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


def test_event_loops_share_a_store(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "x.db")
    asyncio.run(store.open())

    async def work(name: str) -> None:
        for number in range(100):
            size = 1 + 20 * (number % 5 == 0)
            await store.enqueue([make_rollout(f"{name}-{number}-{i}") for i in range(size)])

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda name: asyncio.run(work(name)), "abc"))
    assert asyncio.run(store.count()) == {RolloutStatus.QUEUED: 3 * (80 + 20 * 21)}
    asyncio.run(store.close())


async def test_the_log_is_moved_into_the_file(tmp_path: Path) -> None:
    """Check that commits do not move the log into the file, but the writer's thread does."""
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
