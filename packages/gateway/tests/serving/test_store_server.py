"""Tests of a store's server: authentication, permissions and refused requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib import error as refused, request

import msgspec
import pytest

from lightspan import __version__
from lightspan.errors import ConfigError, StoreError, StoreUnreachableError, how_to_install
from lightspan.schema.redaction import without_keys
from lightspan.schema.semconv import HEADER_PROTOCOL, PROTOCOL_VERSION
from lightspan.stores import open_existing, open_store
from lightspan.stores.protocol import Store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway.limits import StoreServerLimits
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.remote_store.rpc import OPERATIONS
from lightspan_gateway.store_server.api_keys import Keys, take_keys
from lightspan_testing.store_suite import (
    LEASE_S,
    make_call,
    make_production,
    make_rollout,
)
from packages.gateway.tests.remote_store.served import (
    ADMIN,
    KEYS,
    READER,
    RUNNER,
    TRAINER,
    Served,
    serving,
)

TRACER = "a-tracer-key-0123456789"


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        return str(msgspec.msgpack.decode(self.body)["message"])


def ask(
    url: str, path: str, body: bytes | None = None, key: str = TRAINER, **headers: str
) -> Answer:
    """Send one raw request."""
    defaults = {
        "Authorization": f"Bearer {key}",
        HEADER_PROTOCOL: str(PROTOCOL_VERSION),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    message_request = request.Request(url + path, data=body, headers=defaults)
    try:
        with request.urlopen(message_request, timeout=30) as response:
            return Answer(response.status, dict(response.headers), response.read())
    except refused.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read())


def packed(**arguments: Any) -> bytes:
    return msgspec.msgpack.encode(arguments)


OLD_TRAINER = "a-trainer-key-of-before-01"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), Keys(KEYS)) as served:
        yield served


@pytest.fixture
def open_as(served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that opens the served store with a given key."""

    def made(key: str) -> Store:
        name = f"KEY_{len(key)}_{key[-4:].upper()}".replace("-", "_")
        monkeypatch.setenv(name, key)
        return open_store(f"{served.url}?api_key_env={name}")

    return made


# --- authentication -------------------------------------------------------------------------
@pytest.mark.parametrize("key", ["", TRAINER[:-1], TRAINER + " x", "ü"])
async def test_who_has_no_key_learns_nothing(served: Served, key: str) -> None:
    for path, body in {
        "/store/v1": None,
        "/store/v1/count": b"",
        "/store/v1/nonsense": b"",
        "/else": None,
    }.items():
        answer = await asyncio.to_thread(ask, served.url, path, body, key.encode().decode("latin1"))
        assert answer.status == 401
        assert answer.message == (
            "the key is wrong or missing: set LIGHTSPAN_STORE_KEY, or the variable that "
            "?api_key_env= names, to a key of this store"
        )


async def test_a_wrong_key_is_named_and_not_shown(
    open_as: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "a-key-of-nobody-0123456789"
    store = open_as(wrong)
    with pytest.raises(StoreError, match=r"the key in \$KEY_26_6789") as caught:
        await store.open()
    assert wrong not in f"{caught.value} {store!r} {store.url} {caplog.text}"


async def test_a_key_that_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with a removed key gets an error, without retries."""
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", OLD_TRAINER)
    old, new = (Keys({Role.TRAINER: key}) for key in (OLD_TRAINER, TRAINER))
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), old) as served:
        async with open_store(served.url) as store:
            await store.enqueue([make_rollout()])
            port = await asyncio.to_thread(served.stop)
            served._keys = new
            await asyncio.to_thread(served.start, port)
            with pytest.raises(StoreError, match="the key is wrong or missing"):
                await store.count()


def test_keys_are_taken_out_of_the_environment() -> None:
    environment = {"T": TRAINER, "R": RUNNER, "LANG": "C"}
    keys = take_keys({Role.TRAINER: "T", Role.RUNNER: "R"}, environment)
    assert environment == {"LANG": "C"}
    roles = [keys.role_of(key) for key in (TRAINER, RUNNER, ADMIN, "")]
    assert roles == [Role.TRAINER, Role.RUNNER, None, None]
    assert TRAINER not in without_keys(f"an error says {TRAINER}")
    assert not any(key in repr(vars(keys)) for key in (TRAINER, RUNNER))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({}, "--without-key"),
        ({Role.TRAINER: "GONE"}, "--trainer-key-env GONE: that variable is not set"),
        ({Role.ADMIN: "SHORT"}, "a key of 15 characters can be guessed"),
        ({Role.ADMIN: "LINES"}, "$LINES is no key"),
        ({Role.TRAINER: "T", Role.RUNNER: "SAME"}, "SAME holds the key of another role"),
    ],
)
def test_keys_that_are_none(names: dict[Role, str], said: str) -> None:
    secrets = {"SHORT": "x" * 15, "LINES": f"{TRAINER}\n{TRAINER}", "T": TRAINER, "SAME": TRAINER}
    environment = dict(secrets)
    with pytest.raises(ConfigError) as caught:
        take_keys(names, environment)
    assert said in str(caught.value)
    assert not any(key in str(caught.value) for key in secrets.values())
    assert not set(environment) & set(names.values())


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Host": "["}]
)
async def test_without_keys_no_web_page_comes_in(tmp_path: Path, headers: dict[str, str]) -> None:
    with serving(lambda: SQLiteStore(tmp_path / "store.db")) as served:
        for path, body in {"/store/v1": None, "/store/v1/count": packed()}.items():
            answer = await asyncio.to_thread(ask, served.url, path, body, **headers)
            assert answer.status in (400, 403)
        assert (await asyncio.to_thread(ask, served.url, "/store/v1")).status == 200


# --- permissions ----------------------------------------------------------------------------
def test_what_a_runner_may_do() -> None:
    """A runner's key allows only the operations listed here."""
    runners = {name for name, operation in OPERATIONS.items() if Role.RUNNER in operation.roles}
    assert runners == {
        *("claim", "await_work", "heartbeat", "report", "finish", "add_spans", "get_resources"),
        *("announce", "withdraw", "peers", "rollouts", "attempts", "add_images"),
    }
    assert all(Role.ADMIN in operation.roles for operation in OPERATIONS.values())
    beyond = [name for name, operation in OPERATIONS.items() if Role.TRAINER not in operation.roles]
    assert beyond == ["prune"]


_READS = (
    *("rollouts", "summaries", "search", "watch", "count", "attempts", "attempt", "spans"),
    *("token_records", "images", "get_resources", "policy_versions", "peers"),
)


def test_what_a_reader_may_do() -> None:
    """A reader's key allows only reads, and none that tells whose a call token is."""
    readers = {name for name, operation in OPERATIONS.items() if Role.READER in operation.roles}
    assert readers == set(_READS)
    reads = {name for name, operation in OPERATIONS.items() if operation.only_reads}
    assert reads == readers | {"await_work", "claim_of_token"}


async def test_a_reader_sees_everything_but_call_tokens(served: Served, open_as: Any) -> None:
    async with open_as(TRAINER) as trainer, open_as(READER) as reader:
        await trainer.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        await trainer.start([make_production("ro-served", token="at-ro-served.secret")])
        claims = await trainer.claim("runner-1", 2, LEASE_S)
        call = make_call(claims[0].attempt)
        await trainer.add_calls([call])
        resources = await trainer.put_resources({})
        ids = [claim.attempt.attempt_id for claim in claims]
        arguments: dict[str, dict[str, Any]] = {
            "search": {"text": "call-1"},
            "attempts": {"rollout_ids": ["ro-1", "ro-2", "ro-served"]},
            "attempt": {"attempt_id": ids[0]},
            "spans": {"attempt_ids": ids},
            "token_records": {"attempt_ids": ids},
            "images": {"digests": ["0" * 64]},
            "get_resources": {"resources_id": resources},
            "policy_versions": {"policy": "sql"},
        }
        tokens = [claim.attempt.call_token for claim in claims]
        for name in _READS:
            path, body = f"/store/v1/{name}", packed(**arguments.get(name, {}))
            answer = await asyncio.to_thread(ask, served.url, path, body, READER)
            assert answer.status == 200
            for token in (*tokens, "at-ro-served.secret"):
                assert token.encode() not in answer.body
        assert (await reader.spans(ids))[ids[0]] == [call.span]
        assert len(await reader.attempts(["ro-1", "ro-2", "ro-served"])) == 3
        assert {row.rollout_id for row in (await reader.summaries()).rows} == {
            *("ro-1", "ro-2", "ro-served")
        }
        for name in OPERATIONS.keys() - set(_READS):
            answer = await asyncio.to_thread(ask, served.url, f"/store/v1/{name}", b"", READER)
            assert answer.status == 403
            assert f"a reader's key may not call {name}" in answer.message


async def test_a_reader_cannot_store_traces(served: Served) -> None:
    answer = await asyncio.to_thread(ask, served.url, "/v1/traces", b"", READER)
    assert answer.status in (403, 404)  # 404 without the plugin that takes traces


async def test_a_served_store_opened_for_reading(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", TRAINER)
    async with open_existing(served.url, read_only=True) as store:
        assert await store.count() == {}
        with pytest.raises(StoreError, match="reading only"):
            await store.enqueue([make_rollout()])


async def test_who_may_have_the_store_forget(open_as: Any) -> None:
    async with open_as(TRAINER) as trainer, open_as(ADMIN) as admin:
        await trainer.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        await trainer.cancel(["ro-1", "ro-2"])
        with pytest.raises(
            StoreError, match=r"a trainer's key may not call prune, only that of: admin"
        ):
            await trainer.prune(0.0)
        assert await admin.prune(0.0) == 1


async def test_a_runner_sees_the_tokens_of_its_own_claims_only(open_as: Any) -> None:
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as one, open_as(RUNNER) as other:
        await trainer.enqueue([make_rollout("ro-1"), make_rollout("ro-2")])
        [mine] = await one.claim("runner-1", 1, LEASE_S)
        [theirs] = await other.claim("runner-2", 1, LEASE_S)
        assert mine.attempt.call_token
        assert theirs.attempt.call_token not in ("", mine.attempt.call_token)
        attempts = await other.attempts(["ro-1", "ro-2"])
        assert [attempt.rollout_id for attempt in attempts] == ["ro-1", "ro-2"]
        assert [attempt.call_token for attempt in attempts] == ["", ""]
        everything = await trainer.attempts(["ro-1", "ro-2"])
        tokens = {attempt.call_token for attempt in everything}
        assert tokens == {mine.attempt.call_token, theirs.attempt.call_token}


async def test_a_runner_sees_no_production(open_as: Any) -> None:
    async with open_as(TRAINER) as trainer, open_as(RUNNER) as store:
        await trainer.start([make_production("ro-served")])
        await trainer.enqueue([make_rollout("ro-1")])
        states = await store.rollouts()
        assert [state.rollout.rollout_id for state in states] == ["ro-1"]
        assert len(await trainer.rollouts()) == 2


# --- what cannot be asked -------------------------------------------------------------------
async def test_what_is_no_operation_is_refused_by_name(served: Served) -> None:
    for name in ("drop_everything", "close", "__aexit__"):
        answer = await asyncio.to_thread(ask, served.url, f"/store/v1/{name}", packed())
        assert answer.status == 404
        assert f"a store has no operation {name!r}; it has put_resources, " in answer.message
    answer = await asyncio.to_thread(ask, served.url, "/v1/chat/completions", b"{}")
    assert (answer.status, "no such address" in answer.message) == (404, True)


@pytest.mark.parametrize("path", ["/", "/metrics", "/favicon.ico", "/v1/traces/x"])
async def test_a_monitor_or_a_browser_is_answered_in_plain_text(served: Served, path: str) -> None:
    for headers, status, text in (
        ({"Authorization": f"Bearer {TRAINER}"}, 404, f"no such address: GET {path}. This is a l"),
        ({}, 401, "the key is wrong or missing: set LIGHTSPAN_STORE_KEY, or the variable that"),
    ):
        question = request.Request(f"{served.url}{path}", headers=headers)
        with pytest.raises(refused.HTTPError) as raised:
            await asyncio.to_thread(request.urlopen, question)
        with raised.value as answer:
            assert (answer.code, answer.headers.get_content_type()) == (status, "text/plain")
            assert answer.read().decode().startswith(text)


@pytest.mark.parametrize("key", [TRACER, TRAINER])
def test_traces_without_their_plugin_are_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The error names the plugin even if the request has no protocol version."""
    monkeypatch.setattr("lightspan_gateway.store_server.server.installed_plugins", lambda group: [])
    keys = Keys({**KEYS, Role.TRACER: TRACER})
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), keys) as served:
        answer = ask(served.url, "/v1/traces", b"{}", key, **{HEADER_PROTOCOL: "none"})
    needed = f"to take traces, the server needs {how_to_install('otel')}"
    assert (answer.status, answer.message) == (404, needed)


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("count", b"\xc1", "the arguments of count cannot be read"),
        ("count", packed(run_id=7), "run_id"),
        ("count", packed(run="x"), "unknown field `run`"),
        ("enqueue", packed(rollouts=[{"rollout_id": "ro-1"}]), "missing required field `task`"),
        ("count", b"\x91" * 100_000, "the arguments of count cannot be read"),
        ("count", b"\x81\xa6run_id\xa2\xff\xfe", "the arguments of count cannot be read"),
    ],
)
async def test_arguments_that_are_none(served: Served, name: str, body: bytes, said: str) -> None:
    answer = await asyncio.to_thread(ask, served.url, f"/store/v1/{name}", body)
    assert answer.status == 400
    assert said in answer.message


async def test_a_runner_of_another_version(
    served: Served, open_as: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names both versions and the fix, before anything is claimed."""
    monkeypatch.setattr("lightspan_gateway.remote_store.client.PROTOCOL_VERSION", 7)
    monkeypatch.setattr("lightspan_gateway.remote_store.client.__version__", "9.8.7")
    with pytest.raises(StoreError) as raised:
        await open_as(RUNNER).open()
    message = str(raised.value)
    assert f"the server's lightspan {__version__} speaks protocol {PROTOCOL_VERSION}" in message
    assert f"this one (9.8.7 of {sys.executable}) speaks 7" in message
    headers = {HEADER_PROTOCOL.replace("-", "_"): "none"}
    answer = await asyncio.to_thread(ask, served.url, "/store/v1/count", packed(), **headers)
    assert answer.status == 409
    assert f"speaks protocol {PROTOCOL_VERSION}, the client's none" in answer.message


async def test_a_body_that_says_no_size(tmp_path: Path) -> None:
    """The limit applies to chunked bodies too."""
    with serving(
        lambda: SQLiteStore(tmp_path / "store.db"), limits=StoreServerLimits(max_body_bytes=1_000)
    ) as served:
        host, port = served.url.removeprefix("http://").split(":")
        head = (
            f"POST /store/v1/count HTTP/1.1\r\nHost: {host}\r\n{HEADER_PROTOCOL}: "
            f"{PROTOCOL_VERSION}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

        def send() -> bytes:
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head.encode() + b"7d0\r\n" + b"x" * 2_000 + b"\r\n0\r\n\r\n")
                return connection.recv(1_000)

        assert b" 413 " in (await asyncio.to_thread(send)).split(b"\r\n")[0]


async def test_a_batch_that_is_too_large(tmp_path: Path) -> None:
    """The limit applies to the whole batch, before any of it is executed."""
    limits = StoreServerLimits(max_body_bytes=1_000)
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), limits=limits) as served:
        lease = {"runner_id": "r" * 400, "slots": 1, "lease_s": LEASE_S}
        for number, status in ((1, 200), (3, 413)):
            body = msgspec.msgpack.encode([("claim", packed(**lease))] * number)
            assert (await asyncio.to_thread(ask, served.url, "/store/v1", body)).status == status


# --- several at once ------------------------------------------------------------------------
async def test_what_is_asked_together_is_answered_each(served: Served, open_as: Any) -> None:
    """A failed, invalid, forbidden or unbatchable operation fails alone."""
    async with open_as(TRAINER) as store:
        await store.enqueue([make_rollout()])
    lease = {"runner_id": "runner", "slots": 1, "lease_s": LEASE_S}
    items = [
        ("mark_damaged", packed(attempt_id="at-nobody", reason="x")),
        ("claim", packed(**lease)),
        ("claim", b"\xc1"),
        ("nonsense", packed()),
        ("count", packed()),
        ("heartbeat", packed(attempts=[], lease_s=1.0)),
    ]
    answer = await asyncio.to_thread(ask, served.url, "/store/v1", msgspec.msgpack.encode(items))
    assert answer.status == 200
    answers = msgspec.msgpack.decode(answer.body)
    assert [status for status, _ in answers] == [409, 200, 400, 404, 400, 400]
    assert "at-nobody" in msgspec.msgpack.decode(answers[0][1])["message"]
    assert "must not be in a batch" in msgspec.msgpack.decode(answers[4][1])["message"]
    [claim] = msgspec.msgpack.decode(answers[1][1])
    assert claim["rollout"]["rollout_id"] == "ro-1"
    runners = await asyncio.to_thread(
        ask, served.url, "/store/v1", msgspec.msgpack.encode(items[:2]), RUNNER
    )
    assert [status for status, _ in msgspec.msgpack.decode(runners.body)] == [403, 200]


async def test_what_cannot_be_asked_together(served: Served) -> None:
    for items, said in (("no list", "cannot be read"), ([("claim", b"")] * 65, "64 at most")):
        body = msgspec.msgpack.encode(items)
        answer = await asyncio.to_thread(ask, served.url, "/store/v1", body)
        assert (answer.status, said in answer.message) == (400, True)


# --- health ---------------------------------------------------------------------------------
async def is_healthy(served: Served) -> bool:
    """The health check needs no key and reveals nothing else."""
    answer = await asyncio.to_thread(ask, served.url, "/health", None, "")
    is_ok = answer.status == 200
    assert (answer.status, json.loads(answer.body)) == (
        (200, {"status": "ok"}) if is_ok else (503, {"status": "failed"})
    )
    return is_ok


async def test_health(tmp_path: Path) -> None:
    """A store that cannot be written is not healthy, although it can be read."""
    path = tmp_path / "store.db"
    limits = StoreServerLimits(health_timeout_s=0.3, health_interval_s=0.0)
    with serving(lambda: SQLiteStore(path), Keys(KEYS), limits=limits) as served:
        assert await is_healthy(served)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            assert not await is_healthy(served)
            assert await asyncio.wrap_future(count_of(served)) == {}
            db.execute("ROLLBACK")
        while not await is_healthy(served):  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.05)
        await asyncio.to_thread(served.run, until_nobody_is_announced(served.store))
        await asyncio.to_thread(served.run, served.store.close())
        assert not await is_healthy(served)


def count_of(served: Served) -> Any:
    return asyncio.run_coroutine_threadsafe(served.store.count(), served._loop)


async def until_nobody_is_announced(store: Store) -> None:
    """Wait until the checks have left no trace, the one that was given up included."""
    while await store.peers():  # noqa: ASYNC110 - in a store
        await asyncio.sleep(0.05)


async def test_a_database_that_is_away_is_one_to_come_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable database is a 503, which clients retry."""

    async def away(run_id: str | None = None) -> Any:
        raise StoreUnreachableError("the server cannot be reached")

    with serving(lambda: SQLiteStore(tmp_path / "store.db")) as served:
        monkeypatch.setattr(served.store, "count", away)
        answer = await asyncio.to_thread(ask, served.url, "/store/v1/count", packed())
        assert (answer.status, answer.message) == (503, "the server cannot be reached")
