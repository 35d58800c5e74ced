"""Tests of `Hosts`, of the token that runners are given, and of their encrypted connection."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from lightspan.errors import (
    ConfigError,
    StoreError,
    StoreUnreachableError,
    UnsupportedError,
    how_to_install,
)
from lightspan.runners.discovery import make_peer
from lightspan.runners.protocol import RunnerPlan, WatchedRunners
from lightspan.schema.records import PeerRole
from lightspan.stores import open_store, relay_url
from lightspan.stores.sqlite.store import SQLiteStore
from lightspan.stores.timings import StoreTimings
from lightspan_cluster.external_runners import RunnerWatch
from lightspan_cluster.hosts import LEAVE_S, Hosts
from lightspan_cluster.join_token import JoinToken, take_token
from lightspan_cluster.tunnel import Tunnel
from lightspan_gateway.remote_store.store import RemoteStore

LINE = re.compile(r"lightspan runner --join (\S+) app:answer")


def plan_of(folder: Path, name: str = "store.db") -> RunnerPlan:
    return RunnerPlan(store_url=f"sqlite:///{folder}/{name}", app="app:answer", run_id="run-1")


async def join_of(hosts: Hosts, plan: RunnerPlan) -> JoinToken:
    """Return what the line says that `hosts` prints for other machines."""
    lines: asyncio.Queue[str] = asyncio.Queue()
    async with open_store(plan.store_url) as store:
        watching = asyncio.create_task(hosts.watch(store, lines.put_nowait))
        while not (match := LINE.search(await lines.get())):
            pass
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return JoinToken.parse(match[1])


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[JoinToken]:
    """Serve a store at a loopback address; return what the printed line says."""
    hosts = Hosts(address="127.0.0.1")
    assert isinstance(hosts, WatchedRunners)
    await hosts.start(plan_of(tmp_path))
    yield await join_of(hosts, plan_of(tmp_path))
    await hosts.stop()


async def count_by(join: JoinToken) -> Any:
    """Return the number of rollouts in the store, as a runner with `join` reads it."""
    async with Tunnel(join) as tunnel, RemoteStore(tunnel.keep(), timings=QUICK) as store:
        return await store.rollouts()


QUICK = StoreTimings(server_retry_s=0.0)


# --- the token --------------------------------------------------------------------------------
@pytest.mark.parametrize("host", ["10.0.0.5", "gpu.example", "fd00::1"])
def test_what_is_printed_is_what_is_read(host: str) -> None:
    token = JoinToken(host, 41_234, "k" * 32, "f-" * 16)
    assert JoinToken.parse(token.text) == token
    assert take_token(token.text) == token


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("10.0.0.5:41234", "the token after 10.0.0.5:41234/ is no text of 64 letters"),
        (f"10.0.0.5:41234/{'s3cret' * 10}", "the token after 10.0.0.5:41234/ is no text of 64"),
        (f"10.0.0.5:41234/{'s3cret/' * 10}", "the token after 10.0.0.5:41234/ is no text of 64"),
        (f"10.0.0.5/{'s3cret00' * 8}", "it does not begin with HOST:PORT/"),
        (f"10.0.0.5:99999/{'s3cret00' * 8}", "it does not begin with HOST:PORT/"),
        ("10.0.0.5:41234/TOKEN", "TOKEN stands for the token itself: copy the whole HOST:PORT/TOK"),
        ("HOST:PORT/TOKEN", "TOKEN stands for the token itself: copy"),
        (f":41234/{'s3cret00' * 8}", "it does not begin with HOST:PORT/"),
        ("s3cret00" * 8, "it does not begin with HOST:PORT/"),
    ],
)
def test_a_damaged_token_is_refused_and_not_shown(text: str, problem: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--join .*{problem}.*the line that the trainer"
    ) as raised:
        take_token(text)
    assert "s3cret" not in str(raised.value)


# --- what the trainer serves ------------------------------------------------------------------
async def test_a_runner_opens_the_store_by_the_line(
    served: JoinToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the key is the line's, whatever the environment of the host holds."""
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", "the-key-of-another-store")
    assert await count_by(served) == []


async def test_messages_name_the_trainer_s_machine(served: JoinToken) -> None:
    async with Tunnel(served) as tunnel:
        url = tunnel.keep()
        assert url == f"https://127.0.0.1:{served.port}"
        assert open_store(url).url == url
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/gateway", relay_url(url))


async def test_the_key_is_a_runner_s(served: JoinToken) -> None:
    async with Tunnel(served) as tunnel, RemoteStore(tunnel.keep(), timings=QUICK) as store:
        with pytest.raises(StoreError, match="a runner's key may not call cancel"):
            await store.cancel(["ro-1"])


async def test_a_wrong_key(served: JoinToken) -> None:
    wrong = served._replace(key="x" * 32)
    with pytest.raises(StoreError, match=r"has another token: copy the line .* again") as raised:
        await count_by(wrong)
    assert f"127.0.0.1:{served.port}" in str(raised.value)
    assert "xxx" not in str(raised.value)


async def test_another_certificate(served: JoinToken) -> None:
    wrong = served._replace(fingerprint="x" * 32)
    with pytest.raises(StoreError, match="another certificate than the token names") as raised:
        await count_by(wrong)
    assert not isinstance(raised.value, StoreUnreachableError)


async def test_nothing_is_sent_to_another_server(served: JoinToken) -> None:
    """Check that a server in between, which speaks TLS, never reads the key."""
    received = b""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        received += await reader.read(2**16)
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreError):
            await count_by(served._replace(port=port))
    assert served.key.encode() not in received


async def test_a_server_without_tls(unused_tcp_port: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(2**16)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", unused_tcp_port)
    async with server:
        join = JoinToken("127.0.0.1", unused_tcp_port, "k" * 32, "f" * 32)
        with pytest.raises(StoreError, match=r"is no trainer with runners=Hosts\(\)"):
            await count_by(join)


async def test_no_server(unused_tcp_port: int) -> None:
    join = JoinToken("127.0.0.1", unused_tcp_port, "k" * 32, "f" * 32)
    reason = f"the trainer at 127.0.0.1:{unused_tcp_port} cannot be reached .*[Rr]efused"
    with pytest.raises(StoreUnreachableError, match=reason):
        await count_by(join)


async def test_a_model_call_without_a_server(unused_tcp_port: int) -> None:
    """Check that clients of an app get an error in JSON, after which they may try again."""
    join = JoinToken("127.0.0.1", unused_tcp_port, "k" * 32, "f" * 32)
    async with Tunnel(join) as tunnel, aiohttp.ClientSession() as session:
        url = relay_url(tunnel.keep())
        async with session.post(f"{url}/v1/chat/completions", json={"n": "x" * 2**19}) as answer:
            assert answer.status == 502
            assert "cannot be reached" in (await answer.json())["error"]["message"]


async def test_a_resumed_run_keeps_its_line(tmp_path: Path) -> None:
    first, second = Hosts(address="127.0.0.1"), Hosts(address="127.0.0.1")
    joins = []
    for hosts in (first, second, second):
        await hosts.start(plan_of(tmp_path))
        joins.append(await join_of(hosts, plan_of(tmp_path)))
        await hosts.stop()
        await hosts.stop()
    assert joins[0] == joins[1] == joins[2]
    for name in ("store.hosts.pem", "store.hosts.json"):
        assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o600


async def test_a_complete_training_waits_for_a_runner_that_was_silent(tmp_path: Path) -> None:
    """Check that the trainer of a resumed run gives its runners time to see that it is complete."""
    plan, hosts = plan_of(tmp_path), Hosts(address="127.0.0.1")
    await hosts.start(plan)
    async with SQLiteStore(tmp_path / "store.db", clock=lambda: time.time() - 60.0) as store:
        trainer = make_peer(plan.run_id, PeerRole.TRAINER, plan.app, run_id=plan.run_id)
        await store.announce(msgspec.structs.replace(trainer, complete=True))
        await store.announce(make_peer("runner-1", PeerRole.RUNNER, plan.app))
        stopping = asyncio.create_task(hosts.stop())
        await asyncio.sleep(0.5)
        assert not stopping.done()
        await store.withdraw("runner-1")
        await asyncio.wait_for(stopping, LEAVE_S / 2)


async def test_another_run_has_another_line(tmp_path: Path) -> None:
    joins = []
    for name in ("first.db", "second.db"):
        hosts = Hosts(address="127.0.0.1")
        await hosts.start(plan_of(tmp_path, name))
        joins.append(await join_of(hosts, plan_of(tmp_path, name)))
        await hosts.stop()
    assert joins[0].key != joins[1].key
    assert joins[0].fingerprint != joins[1].fingerprint


async def test_the_token_is_in_no_other_message(tmp_path: Path) -> None:
    hosts = Hosts(address="127.0.0.1", timeout_s=1.0)
    plan = plan_of(tmp_path)
    await hosts.start(plan)
    join = await join_of(hosts, plan)
    hosts.missing_s = 2.0
    start = (
        f"in the app's environment, `lightspan runner --join {join.place}/TOKEN app:answer`, with "
        "the token for TOKEN: the whole line was printed at the start"
    )
    with pytest.raises(Exception, match=re.escape(f"no runner for 2 s: start one {start}, and go")):
        hosts.check()
    lines: list[str] = []
    RunnerWatch(plan, hosts, lines.append).update([], 0.0)
    assert lines == [f"waiting for runners: {start}"]
    await hosts.stop()


# --- options ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"port": 0}, "port=0 must be at least 1"),
        ({"port": 70_000}, "port=70000 must be at most 65535"),
        ({"address": "10.0.0.5:8000"}, r"address='10.0.0.5:8000' is no name .*\(port=\)"),
        ({"address": "0.0.0.0"}, "address='0.0.0.0' is no name"),
        ({"address": "https://gpu"}, "address='https://gpu' is no name"),
        ({"address": ""}, "address='' is no name"),
        ({"address": 5}, "address=5 is no name"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Hosts(**options)


@pytest.mark.parametrize(
    ("module", "missing"),
    [("hosts", "cryptography"), ("hosts", "lightspan_gateway"), ("tunnel", "lightspan_gateway")],
)
def test_a_package_is_missing(module: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"lightspan_cluster.{module}")
    with pytest.raises(ConfigError, match=f"needs .*{re.escape(how_to_install('hosts'))}"):
        importlib.import_module(f"lightspan_cluster.{module}")


async def test_a_store_that_has_a_server() -> None:
    plan = RunnerPlan(store_url="https://agents.example", app="app:answer")
    hosts = Hosts(address="127.0.0.1")
    with pytest.raises(UnsupportedError, match=r"https://agents.example has a server.*Exter"):
        await hosts.start(plan)
    await hosts.stop()


async def test_a_port_in_use(tmp_path: Path) -> None:
    first, second = Hosts(address="127.0.0.1"), Hosts(address="127.0.0.1")
    await first.start(plan_of(tmp_path))
    try:
        with pytest.raises(ConfigError, match=r"cannot listen on .*Hosts\(port=…\) sets the port"):
            await second.start(plan_of(tmp_path))
    finally:
        await second.stop()
        await first.stop()


@pytest.mark.parametrize("name", ["store.hosts.pem", "store.hosts.json"])
async def test_damaged_files(tmp_path: Path, name: str) -> None:
    hosts = Hosts(address="127.0.0.1")
    await hosts.start(plan_of(tmp_path))
    await hosts.stop()
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=f"{name}.* cannot be used .*: delete both"):
        await hosts.start(plan_of(tmp_path))
    await hosts.stop()
