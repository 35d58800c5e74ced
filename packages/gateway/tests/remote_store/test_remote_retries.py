"""Tests of a remote store's retries, and of their idempotency."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import StoreError, StoreFormatError, StoreUnreachableError
from lightspan.runners.gateway_probe import GatewayEndpoint
from lightspan.schema.records import AttemptRef, RolloutStatus
from lightspan.schema.semconv import PROTOCOL_VERSION
from lightspan.stores import open_store
from lightspan.stores.sqlite import SQLiteStore
from lightspan.stores.timings import StoreTimings
from lightspan_gateway.limits import StoreServerLimits
from lightspan_gateway.remote_store import client
from lightspan_gateway.remote_store.store import RemoteStore
from lightspan_testing.store_suite import (
    LEASE_S,
    make_rollout,
)
from packages.core.tests.stores.lives import check_once, live
from packages.core.tests.stores.programs import END, FORKED
from packages.gateway.tests.remote_store.lossy import lossy
from packages.gateway.tests.remote_store.served import Served, serving


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(lambda: SQLiteStore(tmp_path / "store.db")) as served:
        yield served


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses before retries, and skip them."""
    durations: list[float] = []
    sleep = asyncio.sleep

    async def at_once(seconds: float) -> None:
        durations.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client, "_sleep", at_once)
    return durations


@contextmanager
def scripted(
    *answers: tuple[int, dict[str, str]], body: bytes = b"no"
) -> Iterator[tuple[str, list[str]]]:
    """Run a web server that is not lightspan's; yield its address and the requested paths.

    `answers` are (status, headers) of each answer in order. The last one is repeated.
    """
    queue, paths = list(answers), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            status, headers = queue.pop(0) if len(queue) > 1 else queue[0]
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Do not log."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# --- answers that do not come ---------------------------------------------------------------
async def test_every_answer_is_lost_once(served: Served, pauses: list[float]) -> None:
    with lossy(served.url) as proxy:
        await live(proxy.url)
        assert proxy.lost > 40
    await check_once(served.url)
    assert set(pauses) <= {pause for pause in pauses if pause <= 1.25 * client.RETRY_BACKOFF_S[0]}


async def test_a_connection_that_is_open_at_one_end_only(
    served: Served, pauses: list[float]
) -> None:
    """A half-open connection is detected by the read timeout, and the request is retried."""
    with lossy(served.url, silent=True) as proxy:
        async with RemoteStore(proxy.url, timings=StoreTimings(read_timeout_s=0.5)) as store:
            await store.enqueue([make_rollout()])
            [claim] = await store.claim("runner", 1, LEASE_S)
        assert proxy.lost == 2
    assert claim.attempt.number == 1


async def test_a_heartbeat_knows_such_a_connection_in_time(
    served: Served, pauses: list[float]
) -> None:
    """Each heartbeat has its own connection, with a read timeout of a quarter of the lease."""
    with lossy(served.url, silent=True) as proxy:
        async with RemoteStore(proxy.url, timings=StoreTimings(min_read_timeout_s=0.1)) as store:
            assert await store.heartbeat([AttemptRef("at-none", 1)], 2.0)
        assert proxy.lost == 1
    assert len(pauses) == 1


async def test_a_server_that_is_started_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients wait for a restarting server without an error, and no data is lost."""
    waiting, is_back = threading.Semaphore(0), threading.Event()

    async def until_it_is_back(seconds: float) -> None:
        waiting.release()
        await asyncio.to_thread(is_back.wait)

    monkeypatch.setattr(client, "_sleep", until_it_is_back)
    async with open_store(served.url) as store:
        await store.enqueue([make_rollout()])
        changes = await store.watch()
        watching = asyncio.create_task(store.watch(changes.cursor, timeout_s=60))
        await store.count()  # sent after the watch, which is under way then
        port = await asyncio.to_thread(served.stop)
        counting = asyncio.create_task(store.count())
        for _ in range(2):  # the server is unreachable, or stopping
            await asyncio.to_thread(waiting.acquire)
        await asyncio.to_thread(served.start, port)
        is_back.set()
        assert await counting == {RolloutStatus.QUEUED: 1}
        await store.cancel(["ro-1"])
        assert [state.status for state in (await watching).rollouts] == [RolloutStatus.CANCELLED]


async def test_a_server_that_stays_away(served: Served, pauses: list[float]) -> None:
    async with open_store(served.url) as store:
        port = await asyncio.to_thread(served.stop)
        with pytest.raises(StoreError, match="lightspan serve --store") as caught:
            await store.count()
        assert store.url in str(caught.value)
        assert len(pauses) == 14  # .1, .5 and 2 s, and then 5 s until a minute is over
        with pytest.raises(StoreUnreachableError, match="cannot be reached"):
            await open_store(store.url).open()
        await asyncio.to_thread(served.start, port)
        assert await store.count() == {}


async def test_a_patient_client_asks_on(served: Served, pauses: list[float]) -> None:
    """Check a trainer's patience (`patience_s`); a greeting and a closed store have none."""
    async with open_store(served.url, patience_s=3600.0) as store:
        port = await asyncio.to_thread(served.stop)
        with pytest.raises(StoreUnreachableError):
            await store.count()
        assert 3000.0 < sum(pauses) <= 1.25 * 3600.0
        pauses.clear()
        with pytest.raises(StoreUnreachableError):
            await open_store(served.url, patience_s=3600.0).open()
        assert len(pauses) == len(client.GREETING_BACKOFF_S)
        await asyncio.to_thread(served.start, port)
        connection = store._opened
        assert connection._retry_s == 3600.0
    assert connection._retry_s == 60.0  # what is still asked when the store is closed


async def test_an_outage_is_told_once_a_minute(
    served: Served, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """The warning comes before the first pause of 5 s, and never for a greeting.

    What succeeds in between, such as reads while the disk is full, does not repeat it.
    """
    async with open_store(served.url) as store:
        port = await asyncio.to_thread(served.stop)
        with pytest.raises(StoreUnreachableError):
            await open_store(served.url).open()
        assert caplog.messages == []
        errors = await asyncio.gather(store.peers(), store.count(), return_exceptions=True)
        assert {type(item) for item in errors} == {StoreUnreachableError}
        assert len([item for item in pauses if item > 3]) == 2 * 11
        [message] = caplog.messages
        assert message.startswith(f"retrying for up to 60 s: store {served.url} cannot")
        await asyncio.to_thread(served.start, port)
        assert await store.count() == {}
        await asyncio.to_thread(served.stop)
        for seconds, told in ((0.0, 1), (60.0, 2)):
            store._opened._warned_at -= seconds
            with pytest.raises(StoreUnreachableError):
                await store.count()
            assert len(caplog.messages) == told


# --- a server that is busy ------------------------------------------------------------------
async def test_a_busy_server_is_asked_again(pauses: list[float]) -> None:
    busy = [(status, {}) for status in (429, 503, 502)]
    with scripted(*busy, (404, {})) as (url, paths), pytest.raises(StoreFormatError):
        await open_store(url).open()
    assert paths == ["/store/v1"] * 4
    assert len(pauses) == 3


# --- what is no such server, or no such version ---------------------------------------------
@pytest.mark.parametrize("status", [200, 404, 500])
async def test_a_server_of_something_else(status: int) -> None:
    with scripted((status, {})) as (url, paths):
        with pytest.raises(StoreFormatError, match="no `lightspan serve --store"):
            await open_store(url).open()
        assert len(paths) == 1


async def test_a_server_that_sends_clients_on(pauses: list[float]) -> None:
    """A redirect is not followed, because the key would be sent too."""
    away = (301, {"Location": "https://me:word@store.example/x?y=z"})
    with scripted(away) as (url, paths), pytest.raises(StoreError, match=r"with status 301"):
        await open_store(url).open()
    assert (len(paths), pauses) == (1, [])


async def test_https_where_a_server_speaks_http(served: Served, pauses: list[float]) -> None:
    store = open_store(served.url.replace("http:", "https:"))
    with pytest.raises(StoreError, match=r"speaks http, not https: .*write http://"):
        await store.open()
    assert pauses == []


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_another_version(
    served: Served, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr(client, "PROTOCOL_VERSION", version)
    with pytest.raises(StoreFormatError) as caught:
        await open_store(served.url).open()
    for part in (served.url, f"protocol {PROTOCOL_VERSION}", f"speaks {version}", sys.executable):
        assert part in str(caught.value)


async def test_a_body_that_is_too_large(tmp_path: Path) -> None:
    with serving(
        lambda: SQLiteStore(tmp_path / "store.db"), limits=StoreServerLimits(max_body_bytes=100_000)
    ) as served:
        async with open_store(served.url) as store:
            with pytest.raises(StoreError, match=r"enqueue: .*at most 100,000 bytes"):
                await store.enqueue([make_rollout(task="x" * 200_000)])
            await store.enqueue([make_rollout(task="x" * 90_000)])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
async def test_an_answer_that_is_broken_is_asked_for_again(
    answer: bytes, pauses: list[float]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(StoreUnreachableError, match="cannot be reached"):
            await open_store(url).open()
    assert len(pauses) == len(client.GREETING_BACKOFF_S)


@pytest.mark.parametrize(("status", "is_open"), [(200, True), (401, True), (502, False)])
async def test_whether_a_relay_reaches_the_gateway(status: int, is_open: bool) -> None:
    with scripted((status, {})) as (url, paths):
        assert await GatewayEndpoint(f"{url}/gateway", "the-token").is_open() is is_open
    assert paths == ["/gateway/health"]


def test_an_opened_store_after_a_fork(served: Served) -> None:
    program = [sys.executable, "-W", "ignore", "-c", FORKED + END, served.url]
    subprocess.run(program, check=True, timeout=60)
