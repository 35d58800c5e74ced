"""Open SQLite stores for reading only: nothing in their folder changes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightspan.errors import ConfigError, NotFoundError, StoreError, StoreFormatError
from lightspan.schema.records import RolloutStatus
from lightspan.stores import open_existing
from lightspan.stores.sqlite import SQLiteStore, file as sqlite_file
from lightspan.stores.timings import StoreTimings
from lightspan_testing.store_suite import make_rollout

_WRITER = """
import asyncio, os, sys
from lightspan.stores import open_store
from lightspan.schema.records import Rollout
async def main():
    async with open_store(sys.argv[1]) as store:
        print("open", flush=True)
        for turn, line in enumerate(sys.stdin):
            if line == "die\\n":
                os.kill(os.getpid(), 9)
            names = [f"{os.getpid()}-{turn}-{n}" for n in range(int(line))]
            task = {"x": "y" * 2000}
            await store.enqueue([Rollout(rollout_id=n, task=task, task_id="t") for n in names])
            print("done", flush=True)
asyncio.run(main())
"""
"""A process that holds the store open. A line of its input is how many rollouts it enqueues."""


class _Writer:
    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", _WRITER, str(path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "open\n"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def enqueue(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        assert self._answer() == "done\n"

    def die(self) -> None:
        """Kill the process; its write-ahead log stays."""
        self._process.communicate("die\n")

    def close(self) -> None:
        self._process.communicate()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "a store %20 of ü#.db"


@pytest.fixture
def start_writer(path: Path) -> Iterator[Callable[[], _Writer]]:
    writers: list[_Writer] = []

    def begin() -> _Writer:
        writers.append(_Writer(path))
        return writers[-1]

    yield begin
    for writer in writers:
        writer.stop()


_HASHES = """
import hashlib, os, sys
for name in sorted(os.listdir(sys.argv[1])):
    path = os.path.join(sys.argv[1], name)
    print(name, hashlib.sha256(open(path, "rb").read()).hexdigest(), os.stat(path).st_mtime_ns)
"""


def _run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _contents(path: Path) -> list[str]:
    """Return name, hash and time of the last change of each file in the store's folder.

    Another process reads them: closing a file would drop SQLite's locks of this process.
    """
    return _run(_HASHES, path.parent).splitlines()


async def _fill(path: Path, number: int = 3) -> None:
    async with SQLiteStore(path) as store:
        await store.enqueue([make_rollout(f"ro-{n}") for n in range(number)])


async def _count(path: Path) -> int:
    async with open_existing(f"sqlite:{path}", read_only=True) as store:
        return (await store.count())[RolloutStatus.QUEUED]


async def test_a_closed_store(path: Path) -> None:
    await _fill(path)
    before = _contents(path)
    assert len(before) == 1
    async with open_existing(path, read_only=True) as store:
        assert len((await store.summaries()).rows) == 3
        assert await store.search("ro") == []
        with pytest.raises(StoreError, match="opened for reading only"):
            await store.cancel(["ro-1"])
        assert _contents(path) == before
    assert _contents(path) == before


async def test_a_store_that_grows(path: Path, start_writer: Callable[[], _Writer]) -> None:
    writer = start_writer()
    writer.enqueue(2)
    async with open_existing(path, read_only=True) as store:
        before = _contents(path)
        first = await store.summaries()
        assert len(first.rows) == 2
        assert _contents(path) == before
        writer.enqueue(3)
        assert len((await store.summaries(after=first.cursor)).rows) == 3
        changes = await store.watch(first.cursor, timeout_s=5)
        assert len(changes.rollouts) == 3


async def test_after_a_crash(path: Path, start_writer: Callable[[], _Writer]) -> None:
    writer = start_writer()
    writer.enqueue(4)
    writer.die()
    before = _contents(path)
    assert len(before) == 3
    assert await _count(path) == 4
    assert _contents(path) == before
    path.with_name(f"{path.name}-shm").unlink()
    with pytest.raises(StoreError, match=r"cannot be read.*FILE-shm"):
        await _count(path)


async def test_writers_that_come_and_go(path: Path, start_writer: Callable[[], _Writer]) -> None:
    await _fill(path)
    async with open_existing(path, read_only=True) as store:
        total = 3
        for number in (1, 20, 2):
            assert sum((await store.count()).values()) == total
            writer = start_writer()
            writer.enqueue(number)
            total += number
            if number != 2:  # one whose log is read, one that comes and goes unread
                assert sum((await store.count()).values()) == total
            writer.close()
        assert sum((await store.count()).values()) == total
        assert len((await store.summaries()).rows) == total


async def test_a_writer_that_ends_while_a_reader_connects(
    path: Path, start_writer: Callable[[], _Writer]
) -> None:
    """The last writer removes the log, which the reader has found and cannot make itself."""
    await _fill(path)
    writer = start_writer()
    writer.enqueue(2)
    files = sqlite_file.files_of(path)
    assert files.log is not None
    writer.close()
    db = sqlite_file.connect_to_read(path, files, 1.0, is_written=False)
    assert db.execute("SELECT count(*) FROM rollouts").fetchone() == (5,)
    db.close()


async def test_beside_a_writer_of_this_process(path: Path) -> None:
    """A reader that began without a writer takes no lock of a later writer away."""
    await _fill(path)
    reader = open_existing(path, read_only=True)
    await reader.open()
    async with SQLiteStore(path) as store:
        await store.enqueue([make_rollout("ro-9")])
        assert (await reader.count())[RolloutStatus.QUEUED] == 4
        await reader.close()
        assert "locked" in _run(_EXCLUSIVE, path)
        await store.cancel(["ro-9"])
    assert await _count(path) == 3


@pytest.mark.parametrize("is_alive", [False, True])
async def test_this_process_writes_what_it_also_reads(
    path: Path, start_writer: Callable[[], _Writer], is_alive: bool
) -> None:
    """A page reads a store in use, and rates an attempt in it."""
    writer = start_writer()
    writer.enqueue(3)
    if not is_alive:
        writer.die()
    async with open_existing(path, read_only=True) as reader:
        for total in (4, 5):
            assert (await reader.count())[RolloutStatus.QUEUED] == total - 1
            async with SQLiteStore(path) as store:
                await store.enqueue([make_rollout(f"ro-{total}")])
                assert (await reader.count())[RolloutStatus.QUEUED] == total
            assert (await reader.count())[RolloutStatus.QUEUED] == total
    assert await _count(path) == 5


_EXCLUSIVE = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=0)
db.execute("PRAGMA locking_mode = EXCLUSIVE")
try:
    db.execute("BEGIN EXCLUSIVE")
except sqlite3.OperationalError as error:
    print(error)
"""

_AS_ANOTHER_USER = """
import asyncio, os, sys
from lightspan.errors import StoreError
from lightspan.stores import open_existing
from lightspan.stores._sql.queries import named_queries
from lightspan.stores.sqlite import SQLiteStore
from lightspan.stores.sqlite.tables import SQLiteReadTables
named_queries(SQLiteReadTables.package, SQLiteReadTables._translate)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
async def main():
    try:
        async with open_existing(sys.argv[1], read_only=True) as store:
            print(sum((await store.count()).values()))
    except StoreError as error:
        print(type(error).__name__, error)
asyncio.run(main())
"""


@pytest.mark.parametrize("is_used", [False, True])
def test_a_file_of_another_user(is_used: bool) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to other users
        path = Path(name) / "x.db"
        writer = _Writer(path)
        writer.enqueue(5)
        if not is_used:
            writer.close()
        Path(name).chmod(0o555)
        for file in Path(name).iterdir():
            file.chmod(0o444)
        before = _contents(path)
        assert _run(_AS_ANOTHER_USER, path) == "5\n"
        assert _contents(path) == before
        path.chmod(0o000)
        message = _run(_AS_ANOTHER_USER, path)
        assert message.startswith("StoreError")
        for text in ("cannot be read", "permissions", str(path)):
            assert text in message
        writer.stop()
        Path(name).chmod(0o755)


def _change(path: Path, statement: str) -> None:
    _run(_EXECUTE, path, statement)


_EXECUTE = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.argv[2])"


@pytest.mark.parametrize(("change", "text"), [(1, "newer lightspan"), (-2, "older lightspan")])
async def test_another_format_is_refused_and_stays(path: Path, change: int, text: str) -> None:
    await _fill(path)
    _change(path, f"PRAGMA user_version = {sqlite_file.FORMAT_VERSION + change}")
    before = _contents(path)
    with pytest.raises(StoreFormatError, match=text):
        await _count(path)
    assert _contents(path) == before


async def test_what_is_no_store(path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing was recorded"):
        open_existing(path, read_only=True)
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreFormatError, match="not a SQLite file"):
        await _count(path)
    path.unlink()
    _change(path, "PRAGMA user_version = 0; CREATE TABLE t (x); DROP TABLE t")
    with pytest.raises(NotFoundError, match="nothing was recorded"):
        await _count(path)
    _change(path, "CREATE TABLE t (x)")
    with pytest.raises(StoreFormatError, match="another program"):
        await _count(path)
    with pytest.raises(ConfigError):
        open_existing("memory", read_only=True)


async def test_a_damaged_store(path: Path) -> None:
    await _fill(path, 200)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    before = _contents(path)
    with pytest.raises(StoreFormatError, match="damaged"):
        await _count(path)
    assert _contents(path) == before


async def test_a_store_that_is_gone_or_another(path: Path) -> None:
    await _fill(path)
    second = path.with_name("second.db")
    await _fill(second, 5)
    async with open_existing(path, read_only=True) as store:
        assert (await store.count())[RolloutStatus.QUEUED] == 3
        path.unlink()
        with pytest.raises(StoreError, match="cannot be read any more"):
            await store.count()
        second.rename(path)
        assert (await store.count())[RolloutStatus.QUEUED] == 5


@pytest.fixture
def locked(path: Path, start_writer: Callable[[], _Writer]) -> Iterator[None]:
    """Hold a store's lock in another process."""
    writer = start_writer()
    writer.enqueue(1)
    writer.die()  # the log stays, so the next reader takes locks
    command = [sys.executable, "-c", _HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield
        holder.communicate()


@pytest.mark.usefixtures("locked")
async def test_a_locked_store(path: Path) -> None:
    store = SQLiteStore(path, timings=StoreTimings(busy_timeout_s=0.2))
    store.read_only = True
    with pytest.raises(StoreError, match="held its lock"):
        await store.open()


_HOLD = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA locking_mode = EXCLUSIVE")
db.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""
