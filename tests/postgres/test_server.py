"""Test failures of the PostgreSQL server: settings, tables, permissions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from lightspan import __version__
from lightspan.errors import (
    DataError,
    NotFoundError,
    StoreError,
    StoreFormatError,
    StoreUnreachableError,
)
from lightspan.schema.records import Mode, RolloutStatus
from lightspan.stores import open_existing, open_store
from lightspan_cluster.postgres import schema
from lightspan_cluster.postgres.dsn import read_address
from lightspan_cluster.postgres.store import PostgresStore
from lightspan_testing.store_suite import (
    IMAGE,
    LEASE_S,
    make_call,
    make_peer,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
)
from tests.postgres.cluster import PASSWORD, Cluster


def schema_of(url: str) -> str:
    return read_address(url).schema


async def refused(url: str, *words: str, kind: type[StoreError] = StoreError) -> str:
    """Check that opening raises `kind` with the socket, the database and `words` in its message."""
    with pytest.raises(kind) as caught:
        await PostgresStore(url).open()
    for word in ("/postgres?host=", *words):
        assert word in str(caught.value)
    return str(caught.value)


# --- opening ------------------------------------------------------------------------------


async def test_a_reader_makes_no_store(cluster: Cluster, url: str) -> None:
    with pytest.raises(NotFoundError, match="nothing was recorded there"):
        await open_existing(url).open()
    with cluster.connect() as db:
        assert db.execute("SELECT to_regnamespace(%s)", (schema_of(url),)).fetchone() == (None,)
    async with open_store(url), open_existing(url) as reader:
        assert await reader.count() == {}


async def test_a_session_for_reading_refuses_to_write(cluster: Cluster, url: str) -> None:
    """The server refuses too, and a store of another version is not changed."""
    reader = open_existing(url, read_only=True)
    with pytest.raises(NotFoundError, match="nothing was recorded there"):
        await reader.open()
    async with open_store(url) as store:
        await store.enqueue([make_rollout()])
        async with open_existing(url, read_only=True) as reader:
            cursor = (await reader.summaries()).cursor
            with pytest.raises(StoreError, match="reading only"):
                await reader.cancel(["ro-1"])
            with pytest.raises(StoreError, match="read-only transaction"):
                await reader._opened.read(lambda: reader._opened.reader._execute("drop_peer", "x"))
            await store.cancel(["ro-1"])
            [state] = (await reader.watch(cursor, timeout_s=10)).rollouts
            assert state.status is RolloutStatus.CANCELLED
    with cluster.connect() as db:
        db.execute(f"UPDATE {schema_of(url)}.lightspan_versions SET version = version + 1")
    with pytest.raises(StoreFormatError, match="newer lightspan"):
        await open_existing(url, read_only=True).open()


_OPEN = """
import asyncio, sys
from lightspan.stores import open_store

async def main():
    store = open_store(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    async with store:
        print(await store.allot_version("sql"))

asyncio.run(main())
"""


def test_processes_that_open_an_empty_database_at_once(url: str) -> None:
    command = [sys.executable, "-c", _OPEN, url]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate()[0] for process in processes]
    assert sorted(answers) == ["1\n", "2\n", "3\n"]


# --- versions -----------------------------------------------------------------------------
async def test_a_schema_from_before_there_were_images(cluster: Cluster, url: str) -> None:
    async with PostgresStore(url) as store:
        attempt = await start(store)
    with cluster.connect(options=f"-c search_path={schema_of(url)}") as db:
        db.execute("DROP TABLE images; DROP TABLE attempt_images")
        db.execute("UPDATE lightspan_versions SET version = 4")
    reader = PostgresStore(url)
    reader.read_only = True
    with pytest.raises(StoreFormatError, match="older lightspan"):
        await reader.open()
    stores = [PostgresStore(url, create=False) for _ in range(3)]
    await asyncio.gather(*(store.open() for store in stores))
    await stores[0].add_images(ref(attempt), [IMAGE])
    for store in stores:
        assert await store.images([IMAGE.digest]) == {IMAGE.digest: IMAGE}
        await store.close()
    async with reader:
        assert await reader.attempt(attempt.attempt_id) == attempt


async def test_a_schema_of_another_version_is_refused(cluster: Cluster, url: str) -> None:
    async with open_store(url):
        pass
    version = schema.VERSION + 1
    with cluster.connect(options=f"-c search_path={schema_of(url)}") as db:
        db.execute("UPDATE lightspan_versions SET version = %s", (version,))
    message = await refused(url, "newer lightspan", kind=StoreFormatError)
    assert f"schema version {version}" in message
    assert f"{__version__} of {sys.executable}, reads {schema.VERSION}" in message


async def test_another_programs_schema_is_refused(cluster: Cluster, url: str) -> None:
    with cluster.connect() as db:
        db.execute(f"CREATE SCHEMA {schema_of(url)} CREATE TABLE theirs (x INT)".encode())
    await refused(url, "another program", "'theirs'", "?schema=", kind=StoreFormatError)


# --- a server that forgets ----------------------------------------------------------------
@pytest.fixture
def own_cluster(postgres: Path) -> Iterator[Cluster]:
    """Run a server whose settings a test may change."""
    with Cluster(postgres) as cluster:
        yield cluster


def tell(cluster: Cluster, *statements: str) -> None:
    with cluster.connect() as db:
        for statement in statements:
            db.execute(statement.encode())


async def test_a_server_that_forgets_is_refused_wherever_that_is_set(own_cluster: Cluster) -> None:
    url = own_cluster.url("x")
    for who, source in (
        ("ROLE lightspan", "user"),
        ("DATABASE postgres", "database"),
        ("ROLE lightspan IN DATABASE postgres", "database user"),
    ):
        tell(own_cluster, f"ALTER {who} SET synchronous_commit = off")
        await refused(url, f"synchronous_commit is off (set by: {source})", "latest writes")
        tell(own_cluster, f"ALTER {who} RESET synchronous_commit")
    await refused(f"{url}&options=-csynchronous_commit%3Doff", "set by: client")
    async with PostgresStore(url) as store:
        await store.enqueue([make_rollout()])
        for name, loss in (("synchronous_commit", "latest writes"), ("fsync", "loses power")):
            tell(own_cluster, f"ALTER SYSTEM SET {name} = off", "SELECT pg_reload_conf()")
            while _setting(own_cluster, name) == "on":
                pass
            await refused(url, f"{name} is off (set by: configuration file)", loss)
            tell(own_cluster, f"ALTER SYSTEM RESET {name}")
        # an existing session keeps its settings
        await store.enqueue([make_rollout("ro-2")])


def _setting(cluster: Cluster, name: str) -> str:
    """Return the value of a setting in a new session."""
    with cluster.connect() as db:
        return str(db.execute(f"SHOW {name}".encode()).fetchone()[0])  # type: ignore[index]


async def test_texts_compare_byte_by_byte_whatever_the_language(cluster: Cluster) -> None:
    """Check that `B` comes before `a`, which the order of a dictionary would reverse."""
    tell(
        cluster,
        "CREATE DATABASE words LOCALE_PROVIDER icu ICU_LOCALE 'en' LOCALE 'C' TEMPLATE template0",
    )
    with cluster.connect() as db:
        in_english = "SELECT 'a' < 'B' COLLATE \"en-x-icu\""
        assert db.execute(in_english.encode()).fetchone() == (True,)
    url = cluster.url("x").replace("/postgres?", "/words?")
    names = ["a", "B", "ä", "Z", "b"]
    async with PostgresStore(url) as store:
        for name in names:
            await store.announce(make_peer(name))
        assert [peer.peer_id for peer in await store.peers()] == ["B", "Z", "a", "b", "ä"]
        await store.enqueue([make_rollout(name, run_id=name) for name in names])
        # a claim for any run reads the runs in their order
        claims = [(await store.claim("runner", 1, LEASE_S))[0] for _ in names]
        assert [claim.rollout.rollout_id for claim in claims] == names
    tell(cluster, "DROP DATABASE words")


# --- who may come in ----------------------------------------------------------------------
async def test_a_password_in_the_url_opens_the_store_and_is_shown_nowhere(
    cluster: Cluster, make_url: Callable[..., str]
) -> None:
    url = make_url(user="locked")
    with_password = url.replace("locked@", f"locked:{quote(PASSWORD, safe='')}@")
    message = await refused(url, "PGPASSWORD", "~/.pgpass")
    wrong = await refused(url.replace("locked@", "locked:hunter2@"), "PGPASSWORD")
    assert "hunter2" not in message + wrong
    store = open_store(with_password)
    assert store.url == url
    async with store:
        await store.enqueue([make_rollout()])
    async with open_store(url) as again:  # this process has the password
        assert await again.count() == {RolloutStatus.QUEUED: 1}


def test_passwords_by_a_service_file(
    cluster: Cluster, make_url: Callable[..., str], tmp_path: Path
) -> None:
    lines = [f"host={cluster.folder}", "user=locked", f"password={PASSWORD}"]
    (tmp_path / "services").write_text("\n".join(["[agents]", *lines, "dbname=postgres", ""]))
    env = {"PGSERVICEFILE": str(tmp_path / "services")}
    url = f"postgresql:///?service=agents&schema={schema_of(make_url(user='locked'))}"
    command = [sys.executable, "-c", _OPEN, url]
    done = subprocess.run(command, input="\n", env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "ready\n1\n"


async def test_what_cannot_be_reached_is_named(cluster: Cluster, tmp_path: Path) -> None:
    url = cluster.url("x")
    with pytest.raises(StoreError, match=r"/nothing\?.*no such database"):
        await PostgresStore(url.replace("/postgres?", "/nothing?")).open()
    with pytest.raises(StoreError, match="no such database or role") as caught:
        await PostgresStore(url.replace("lightspan@", "nobody@")).open()
    assert "nobody" in str(caught.value)
    nowhere = f"postgresql://ada:hunter2@/agents?host={tmp_path}"
    with pytest.raises(StoreUnreachableError, match=r"/agents\?host=.*cannot be reached") as caught:
        await PostgresStore(nowhere).open()
    assert "hunter2" not in str(caught.value)
    with pytest.raises(StoreError, match="no such service"):
        await PostgresStore("postgresql:///?service=nowhere").open()


async def test_what_a_role_needs(cluster: Cluster, url: str) -> None:
    """Check that creating tables needs CREATE on the database, and using them only access to
    rows.
    """
    tell(cluster, "CREATE ROLE guest LOGIN")
    as_guest = url.replace("lightspan@", "guest@")
    await refused(as_guest, "GRANT CREATE ON DATABASE")
    async with PostgresStore(url):
        pass
    schema = schema_of(url)
    rights = "SELECT, INSERT, UPDATE, DELETE"
    tell(
        cluster,
        f"GRANT USAGE ON SCHEMA {schema} TO guest",
        f"GRANT {rights} ON ALL TABLES IN SCHEMA {schema} TO guest",
    )
    async with PostgresStore(as_guest) as store:
        attempt = await start(store)
        assert await store.add_calls([make_call(attempt)]) == [False]
        await store.announce(make_peer("runner"))
        await store.withdraw("runner")
        assert await store.report([make_report(attempt)]) == [True]
        assert len((await store.watch(0, timeout_s=1)).rollouts) == 1
    tell(cluster, "DROP OWNED BY guest", "DROP ROLE guest")


# --- values -------------------------------------------------------------------------------
async def test_texts_that_postgresql_does_not_take(url: str) -> None:
    """Check that any text of users and apps is stored, and that ids with NUL are refused."""
    async with PostgresStore(url) as store:
        attempt = await start(store)
        with pytest.raises(DataError, match="cannot be stored"):
            await store.enqueue([make_rollout("a\0b"), make_rollout("ro-2")])
        with pytest.raises(DataError, match="cannot be stored"):
            await store.add_spans(ref(attempt), [make_span(attempt, span_id="a\0b")])
        assert await store.count() == {RolloutStatus.RUNNING: 1}
        assert await store.claim_of_token("a\0b") is None
        message = "a\0b \udc80 ü"
        await store.report([make_report(attempt, message=message)])
        assert (await store.attempt(attempt.attempt_id)).message == message


async def test_people_are_shown_the_servers_clock(
    cluster: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightspan.schema.clock.now", lambda: 1.0)
    with cluster.connect() as db:
        query = b"SELECT extract(epoch FROM clock_timestamp())::float8"
        async with PostgresStore(url) as store:
            await store.enqueue([make_rollout(mode=Mode.VAL)])
            before = db.execute(query).fetchone()
            [claim] = await store.claim("runner", 1, 60.0)
            after = db.execute(query).fetchone()
            await store.announce(make_peer("runner"))
            [peer] = await store.peers()
            assert before is not None
            assert after is not None
            assert before[0] <= claim.attempt.started_at <= after[0]
            assert 0.0 <= peer.silent_s <= 60.0
            assert await store.expire() == 0
