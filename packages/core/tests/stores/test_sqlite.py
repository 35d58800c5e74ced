"""Run the store suite with SQLiteStore, and test a file that processes share."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightspan import __version__
from lightspan.errors import ConfigError, StoreError, StoreFormatError
from lightspan.schema.records import Attempt, RolloutStatus
from lightspan.stores import open_store
from lightspan.stores.memory import MemoryStore
from lightspan.stores.sqlite import SQLiteStore, file as sqlite_file
from lightspan.stores.timings import StoreTimings
from lightspan_testing.store_suite import (
    IMAGE,
    LEASE_S,
    Clock,
    StoreSuite,
    make_call,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
)
from packages.core.tests.stores.programs import END, FORKED, WRITER, check_acknowledged


class TestSQLiteStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self._folder = tmp_path

    def make_store(self, name: str, clock: Clock) -> SQLiteStore:
        return SQLiteStore(self._folder / f"{name}.db", clock=clock)


@pytest.mark.parametrize(("power_loss", "synchronous"), [(False, 1), (True, 2)])
async def test_power_loss_flushes_every_transaction(
    tmp_path: Path, power_loss: bool, synchronous: int
) -> None:
    async with SQLiteStore(tmp_path / "x.db", power_loss=power_loss) as store:
        assert store.capabilities.power_loss is power_loss
        db = store._opened.tables._db
        assert db.execute("PRAGMA synchronous").fetchone() == (synchronous,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# --- opening ------------------------------------------------------------------------------


async def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite://{tmp_path}/a.db"
    for text in (url, f"sqlite:{tmp_path}/a.db", f"{tmp_path}/a.db", "sqlite:a.db", Path("a.db")):
        assert open_store(text).url == url
    assert open_store("sqlite:a.db?power_loss=true").url == f"{url}?power_loss=true"
    assert open_store(f"{url}?power_loss=true").capabilities.power_loss
    assert not open_store(url).capabilities.power_loss
    (tmp_path / "ü d.db").touch()  # an empty file becomes a store
    async with open_store(open_store("ü d.db").url) as store:
        assert await store.count() == {}
    assert isinstance(open_store("memory:"), MemoryStore)


@pytest.mark.parametrize(
    "url", ["", "mysql://host/db", "plain", "sqlite:", "sqlite://host/x.db", "x.db?mode=ro"]
)
def test_urls_of_nothing(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert repr(url) in str(caught.value)
    assert "power_loss" in str(caught.value) or "sqlite:" in str(caught.value)


async def test_the_file_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        async with SQLiteStore(tmp_path / "x.db") as store:
            await store.enqueue([make_rollout()])
            files = list(tmp_path.iterdir())
            assert len(files) == 3  # the file, its log and its index
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    finally:
        os.umask(old)


async def _refused(path: Path, kind: type[StoreError], *words: str) -> None:
    """Check that opening raises `kind` with the path and `words`, and does not change the file."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(kind) as caught:
        await SQLiteStore(path).open()
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("content", [b"xy", b"not a database" * 1000, bytes(range(256)) * 64])
async def test_a_file_that_is_not_sqlite(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(content)
    await _refused(path, StoreFormatError, "not a SQLite file", "another file")


@pytest.mark.parametrize(
    "statement",
    ["CREATE TABLE t (x)", "PRAGMA application_id = 7", "PRAGMA user_version = 1"],
)
async def test_a_foreign_sqlite_file(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "x.db"
    _execute(path, "CREATE TABLE gone (x)", "DROP TABLE gone", statement)
    await _refused(path, StoreFormatError, "another program", "another file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (1, ("newer lightspan", __version__, "upgrade lightspan")),
        (-2, ("older lightspan", "format 4", "with that lightspan")),
    ],
    ids=["newer", "older"],
)
async def test_a_store_of_another_version(
    tmp_path: Path, change: int, words: tuple[str, ...]
) -> None:
    path = tmp_path / "x.db"
    async with SQLiteStore(path):
        pass
    _execute(path, f"PRAGMA user_version = {sqlite_file.FORMAT_VERSION + change}")
    await _refused(path, StoreFormatError, *words)


async def test_a_store_from_before_there_were_images(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store:
        attempt = await start(store)
    _execute(path, "DROP TABLE images", "DROP TABLE attempt_images", "PRAGMA user_version = 5")
    reader = SQLiteStore(path)
    reader.read_only = True
    async with reader:
        assert await reader.images([IMAGE.digest]) == {}
        assert await reader.attempt(attempt.attempt_id) == attempt
    async with SQLiteStore(path) as store:
        await store.add_images(ref(attempt), [IMAGE])
        assert await store.images([IMAGE.digest]) == {IMAGE.digest: IMAGE}
        assert await store.attempt(attempt.attempt_id) == attempt
    async with reader:
        assert await reader.images([IMAGE.digest]) == {IMAGE.digest: IMAGE}
    async with SQLiteStore(path) as store:
        assert await store.images([IMAGE.digest]) == {IMAGE.digest: IMAGE}


async def test_a_damaged_store(tmp_path: Path) -> None:
    """Check that overwritten pages in the middle of the file raise an error."""
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store:
        await store.enqueue([make_rollout(f"ro-{i}", task="x" * 3000) for i in range(200)])
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(StoreFormatError, match=r"damaged.*recover"):
        async with SQLiteStore(path) as store:
            await store.rollouts()


async def test_places_that_cannot_be(tmp_path: Path) -> None:
    await _refused(tmp_path, StoreError, "is a folder")
    await _refused(tmp_path / "missing" / "x.db", StoreError, "missing does not exist", "create")


_OPEN = """
import asyncio, os, sys
from lightspan.stores.sqlite import SQLiteStore
from lightspan.errors import StoreError
from lightspan.stores._sql.queries import named_queries
from lightspan.stores.sqlite.tables import SQLiteReadTables
named_queries(SQLiteReadTables.package, SQLiteReadTables._translate)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
async def main():
    try:
        async with SQLiteStore(sys.argv[1]) as store:
            await store.allot_version("sql")
    except StoreError as error:
        print(type(error).__name__, error)
asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["folder", "file", "folder of an existing file"])
def test_places_without_permission(what: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to other users
        folder, path = Path(name), Path(name) / "x.db"
        if what != "folder":
            _count(str(path))
            path.chmod(0o444 if what == "file" else 0o666)
        folder.chmod(0o777 if what == "file" else 0o555)
        command = [sys.executable, "-c", _OPEN, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        folder.chmod(0o755)
    assert done.stdout.startswith("StoreError")
    assert str(path) in done.stdout
    assert "permissions" in done.stdout


def _execute(path: Path, *statements: str) -> list[Any]:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        return [db.execute(statement).fetchall() for statement in statements]
    finally:
        db.close()


# --- a full disk ----------------------------------------------------------------------------
async def test_a_full_disk_refuses_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "x.db") as store:
        attempt = await start(store)
        await store.add_calls([make_call(attempt, 1)])
        await _limit_pages(store, 60)
        with pytest.raises(StoreError, match=r"x\.db.*full.*free some space.*SQLITE_FULL"):
            await _add_calls_one_by_one(store, attempt)
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert [record.call_id for record in records] == [
            f"call-{i + 1}" for i in range(len(records))
        ]
        await _limit_pages(store, 1_000_000)
        assert await store.add_calls([make_call(attempt, 1000)]) == [False]
        assert (
            len((await store.spans([attempt.attempt_id]))[attempt.attempt_id]) == len(records) + 1
        )
    assert _execute(tmp_path / "x.db", "PRAGMA integrity_check") == [[("ok",)]]


async def _add_calls_one_by_one(store: SQLiteStore, attempt: Attempt) -> None:
    for number in range(2, 1000):
        await store.add_calls([make_call(attempt, number)])


async def test_what_does_not_fit_does_not_take_its_neighbours_along(tmp_path: Path) -> None:
    """Check that only a too large write fails, among writes in one transaction."""
    async with SQLiteStore(tmp_path / "x.db") as store:
        attempt = await start(store)
        await _limit_pages(store, 200)
        large = make_span(attempt, 999, attributes={"text": "x" * 2_000_000})
        small = [make_span(attempt, number) for number in range(20)]
        writes = [
            store.add_spans(ref(attempt), [span]) for span in (*small[:10], large, *small[10:])
        ]
        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert [answer for answer in answers if answer == 0] == [0] * 20
        assert isinstance(answers[10], StoreError)
        assert (await store.spans([attempt.attempt_id]))[attempt.attempt_id] == small


async def _limit_pages(store: SQLiteStore, pages: int) -> None:
    """Limit the file to a number of pages, like a full disk."""

    def work(items: Any) -> list[None]:
        store._opened.tables._db.execute(f"PRAGMA max_page_count = {pages}")
        return [None for _ in items]

    await store._write(work, [None])


# --- several processes ----------------------------------------------------------------------


def _count(url: str) -> dict[RolloutStatus, int]:
    async def main() -> dict[RolloutStatus, int]:
        async with open_store(url) as store:
            return await store.count()

    return asyncio.run(main())


def _share(url: str, name: str, barrier: Any, results: Any) -> None:
    async def main() -> tuple[int, list[str]]:
        claimed: list[str] = []
        barrier.wait()
        async with open_store(url) as store:
            version = await store.allot_version("sql")
            await store.enqueue([make_rollout(f"{name}-{number}") for number in range(150)])
            await asyncio.to_thread(barrier.wait)
            while claims := await store.claim(name, 3, LEASE_S):
                assert all(await store.report([make_report(claim.attempt) for claim in claims]))
                claimed += [claim.rollout.rollout_id for claim in claims]
        return version, claimed

    results.put(asyncio.run(main()))


def test_processes_create_one_file_and_claim_every_rollout_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(3), spawn.Queue()
    url, names = str(tmp_path / "x.db"), "abc"
    processes = [spawn.Process(target=_share, args=(url, name, barrier, results)) for name in names]
    for process in processes:
        process.start()
    versions, claimed = zip(*(results.get(timeout=60) for _ in processes), strict=True)
    for process in processes:
        process.join()
        process.close()
    results.close()
    results.join_thread()
    assert sorted(versions) == [1, 2, 3]
    enqueued = [f"{name}-{number}" for name in names for number in range(150)]
    assert sorted(itertools.chain(*claimed)) == sorted(enqueued)
    assert _count(url) == {RolloutStatus.SUCCEEDED: 450}


async def test_another_process_wakes_a_watch(tmp_path: Path) -> None:
    url = str(tmp_path / "x.db")
    script = f"""
        import asyncio
        from lightspan.stores import open_store
        from lightspan_testing.store_suite import make_rollout
        async def main():
            async with open_store({url!r}) as store:
                await store.enqueue([make_rollout()])
        asyncio.run(main())
    """
    async with open_store(url) as store:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(script)
        )
        changes = await store.watch(timeout_s=60)
        assert [state.rollout.rollout_id for state in changes.rollouts] == ["ro-1"]
        assert await process.wait() == 0


def test_a_store_after_a_fork(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED + END, str(tmp_path / "x.db")]
    subprocess.run(command, check=True)


# --- kill -9 --------------------------------------------------------------------------------
@pytest.mark.faults
def test_kill_9_loses_nothing_that_was_acknowledged(
    tmp_path: Path, moments: Callable[[Any], random.Random]
) -> None:
    """Kill a writer twelve times at random moments."""
    path = tmp_path / "x.db"
    said: list[list[str]] = []
    for turn in range(12):
        said += _write_and_kill(path, turn, lines=moments(turn).randrange(1, 400))
    assert len(said) > 100
    asyncio.run(check_acknowledged(lambda clock: SQLiteStore(path, clock=clock), said))
    assert _execute(path, "PRAGMA integrity_check") == [[("ok",)]]


def _write_and_kill(path: Path, turn: int, lines: int) -> list[list[str]]:
    """Kill a writer after it has printed `lines` lines; return all of its lines as words."""
    command = [sys.executable, "-c", WRITER, str(path), str(turn)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(lines)]
        os.kill(writer.pid, signal.SIGKILL)
        said += writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    return [line.split() for line in said if line.endswith("\n")]


# --- the cost of a move ---------------------------------------------------------------------
async def _steps(store: SQLiteStore, write: Callable[[], Awaitable[object]]) -> int:
    """Return the number of steps of SQLite's virtual machine during `write`."""
    steps = itertools.count()
    db = store._opened.tables._db
    db.set_progress_handler(lambda: next(steps) and None, 1)
    await write()
    db.set_progress_handler(None, 1)
    return next(steps)


async def test_a_claim_does_not_wade_through_what_is_not_for_it(tmp_path: Path) -> None:
    """Check that another run's queue and ended rollouts add little to the cost of a claim."""
    async with SQLiteStore(tmp_path / "x.db") as store:
        await store.enqueue([make_rollout(f"own-{i}", run_id="own") for i in range(20)])
        own = partial(store.claim, "runner", 1, LEASE_S, "own")
        any_run = partial(store.claim, "runner", 1, LEASE_S)
        before = [await _steps(store, own), await _steps(store, any_run)]
        for run in ("a", "z"):
            await store.enqueue([make_rollout(f"{run}-{i}", run_id=run) for i in range(1000)])
        claims = await store.claim("runner", 500, LEASE_S, "a")
        await store.report([make_report(claim.attempt) for claim in claims])
        after = [await _steps(store, own), await _steps(store, any_run)]
        assert after[0] < before[0] + 50
        assert after[1] < before[1] + 500


# --- the writer -----------------------------------------------------------------------------
async def test_large_batches_are_many_short_transactions(tmp_path: Path) -> None:
    """Check that no transaction exceeds its limit of rows or bytes."""
    async with SQLiteStore(tmp_path / "x.db") as store:
        sizes: list[int] = []
        attempt = await start(store)
        tables = store._opened.tables
        begin = tables.begin

        def begin_and_count() -> None:
            sizes.append(tables._db.total_changes)
            begin()

        tables.begin = begin_and_count  # type: ignore[method-assign]
        await store.add_spans(ref(attempt), [make_span(attempt, i) for i in range(1000)])
        text = {"text": "x" * 100_000}
        await store.add_spans(
            ref(attempt), [make_span(attempt, i, attributes=text) for i in range(1000, 1100)]
        )
        sizes.append(tables._db.total_changes)
        rows = [after - before for before, after in itertools.pairwise(sizes)]
        assert sum(rows) == 1100
        assert max(rows[:-10]) <= 128
        assert max(rows[-10:]) <= 11  # about a megabyte


async def test_a_lock_held_by_another_process_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with SQLiteStore(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        writing = asyncio.create_task(store.enqueue([make_rollout()]))
        assert await store.count() == {}  # readers do not wait
        assert not writing.done()
        other.execute("ROLLBACK")
        await writing
    async with SQLiteStore(path, timings=StoreTimings(busy_timeout_s=0.05)) as store:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"x\.db.*another process"):
            await store.enqueue([make_rollout("ro-2")])
        other.close()
        assert await store.count() == {RolloutStatus.QUEUED: 1}


async def test_pruning_is_never_done_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that another thread prunes, because deleting megabytes would delay heartbeats."""
    async with SQLiteStore(tmp_path / "store.db") as store:
        rollouts = [make_rollout(f"ro-{number}") for number in range(40)]
        await store.enqueue(rollouts)
        await store.cancel([rollout.rollout_id for rollout in rollouts])
        done: list[tuple[int, bool]] = []
        database = store._opened
        prune = database.prune

        def watched(items: Any) -> Any:
            stored = prune(items)
            done.append((stored[0], threading.current_thread() is threading.main_thread()))
            return stored

        monkeypatch.setattr(database, "prune", watched)
        assert await store.prune(0.0) == 39  # the last rollout stays
    assert done == [(16, False), (16, False), (7, False)]


async def test_a_held_lock_is_given_up_after_the_busy_timeout(tmp_path: Path) -> None:
    """The store's own limit ends the wait, long before the default of 30 s."""
    path = tmp_path / "x.db"
    async with SQLiteStore(path, timings=StoreTimings(busy_timeout_s=0.05)) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process"):
            async with asyncio.timeout(10):
                await store.enqueue([make_rollout()])
        other.close()
