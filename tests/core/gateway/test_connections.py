"""Connections: how many at once, how long one may idle, dribble, or leave its answer unread."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.core.gateway.posting import ask

from lightspan.errors import ConfigError
from lightspan.gateway import Gateway, bodies, connections, http_server
from lightspan.gateway.connections import MOST, most_connections, raise_file_limit, read_place
from lightspan.stores.protocol import Store
from lightspan.testing.conditions import until
from lightspan.testing.gateway_suite import Rig, make_rig

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


Connect = Callable[[Rig], Awaitable[Streams]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens a connection, which is closed at the end."""
    opened: list[asyncio.StreamWriter] = []

    async def open_one(rig: Rig) -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", port_of(rig))
        opened.append(streams[1])
        return streams

    yield open_one
    for writer in opened:
        writer.transport.abort()
    await asyncio.sleep(0)


def port_of(rig: Rig) -> int:
    return int(rig.gateway.url.rpartition(":")[2])


async def health(streams: Streams) -> bytes:
    """The first line of the answer to one more request on the connection."""
    reader, writer = streams
    writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-len"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head.partition(b"\r\n")[0]


async def restart(rig: Rig, most: int) -> None:
    """A gateway that holds so many connections."""
    await rig.gateway.close()
    rig.gateway = Gateway(rig.store, rig.engine, most_connections=most)
    await rig.gateway.start()


async def test_a_connection_that_idles_is_closed(
    store: Store, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was never used, one that was, and one whose headers never end."""
    monkeypatch.setattr(http_server, "IDLE_S", 0.3)
    async with make_rig(store, "ok") as rig:
        unused, used, dribbling = [await connect(rig) for _ in range(3)]
        assert await health(used) == b"HTTP/1.1 200 OK"
        dribbling[1].write(b"GET /health HTTP/1.1\r\nHost: a\r\nX: ")
        closed = asyncio.gather(*(reader.read() for reader, _ in (unused, used)))
        assert await closed == [b"", b""]
        reader, writer = dribbling
        while not (reader.at_eof() or reader.exception()):
            writer.write(b"a")
            await asyncio.sleep(0.05)


async def test_a_body_that_dribbles_is_refused(
    store: Store, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.3)
    async with make_rig(store, "ok") as rig:
        reader, writer = await connect(rig)
        token = rig.attempt.call_token.encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 999999\r\n"
            b"Authorization: Bearer " + token + b"\r\n\r\n{"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        [span] = await rig.spans()
        assert "took more than 0.3 s to arrive" in span.status_message


async def test_whoever_comes_when_all_are_taken_takes_the_place_of_the_longest_idle(
    store: Store, connect: Connect
) -> None:
    async with make_rig(store, "ok") as rig:
        await restart(rig, 3)
        first, second, third = [await connect(rig) for _ in range(3)]
        for one in (first, second, third, first):  # the second idles longest now
            assert await health(one) == b"HTTP/1.1 200 OK"
        fourth = await connect(rig)
        assert await health(fourth) == b"HTTP/1.1 200 OK"
        assert await second[0].read() == b""
        for one in (first, third, fourth):
            assert await health(one) == b"HTTP/1.1 200 OK"


async def test_nobody_is_dropped_who_has_only_just_come(
    store: Store, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BRIEFLY_S", 3_600.0, raising=False)
    async with make_rig(store, "ok") as rig:
        await restart(rig, 1)
        first, second = [await connect(rig) for _ in range(2)]
        answer = asyncio.create_task(health(second))
        await asyncio.wait([answer], timeout=0.1)
        assert await health(first) == b"HTTP/1.1 200 OK"
        assert not answer.done()
        first[1].close()
        assert await answer == b"HTTP/1.1 200 OK"


async def test_a_crowd_is_let_in_as_fast_as_others_have_idled(
    store: Store, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place is taken at once: honest callers would wait behind a flood of idle ones."""
    monkeypatch.setattr(connections, "BRIEFLY_S", 0.0, raising=False)
    monkeypatch.setattr(connections, "_LOOK_S", 3_600.0)
    async with make_rig(store, "ok") as rig, asyncio.timeout(30):
        await restart(rig, 2)
        for _ in range(20):
            assert await health(await connect(rig)) == b"HTTP/1.1 200 OK"


async def test_connections_that_are_gone_are_forgotten(store: Store, connect: Connect) -> None:
    async with make_rig(store, "ok") as rig:
        for _ in range(150):
            streams = await connect(rig)
            assert await health(streams) == b"HTTP/1.1 200 OK"
            streams[1].close()
        assert len(rig.gateway._connections._idle) < 100


async def test_a_client_that_is_gone_is_not_told_to_go_on() -> None:
    """aiohttp would log a failure of ours, with its traceback."""

    class Gone:
        output_size = 0

        async def write(self, data: bytes) -> None:
            raise aiohttp.ClientConnectionResetError

    await http_server.go_on(SimpleNamespace(headers={"Expect": "100-continue"}, writer=Gone()))


async def test_where_none_idles_the_next_waits(store: Store, connect: Connect) -> None:
    async with make_rig(store, "ok") as rig:
        await restart(rig, 2)
        token = rig.attempt.call_token.encode()
        body = json.dumps(ask()).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n"
            b"Content-Length: %d\r\n\r\n" % (token, len(body))
        )
        busy = [await connect(rig) for _ in range(2)]
        for _, writer in busy:
            writer.write(head + body[:5])
        working = rig.gateway._connections._idle
        await until(lambda: not working)
        waiting = await connect(rig)
        answer = asyncio.create_task(health(waiting))
        await asyncio.wait([answer], timeout=0.2)
        assert not answer.done()
        busy[0][1].write(body[5:])
        assert (await busy[0][0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        assert await answer == b"HTTP/1.1 200 OK"
        busy[1][1].write(body[5:])  # and the other was not dropped
        assert (await busy[1][0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")


async def test_a_process_without_files_goes_on_accepting(
    store: Store,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with make_rig(store, "ok") as rig:
        accept, failures = socket.socket.accept, iter([errno.EMFILE, errno.ECONNABORTED])

        def without_files(listening: socket.socket) -> Any:
            if (number := next(failures, None)) is not None:
                raise OSError(number, "there are no files left")
            return accept(listening)

        idle = await connect(rig)
        assert await health(idle) == b"HTTP/1.1 200 OK"
        monkeypatch.setattr(socket.socket, "accept", without_files)
        for _ in range(3):
            one = await connect(rig)
            assert await health(one) == b"HTTP/1.1 200 OK"
        assert await idle[0].read() == b""  # its file is of use
        assert "no connection can be accepted for now" in caplog.text


def test_connections_take_a_part_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    for files, most in {256: 102, 1024: 409, 10**6: MOST, resource.RLIM_INFINITY: MOST}.items():
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert most_connections() == most


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot tell")
async def test_an_answer_that_is_left_unread_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    async with make_rig(store, "ok") as rig:
        await restart(rig, 10)
        monkeypatch.setattr(rig.gateway.terms, "models", lambda policies: ["m" * 1_000] * 10_000)
        token = rig.attempt.call_token.encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
            client.connect(("127.0.0.1", port_of(rig)))
            client.send(
                b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n\r\n" % token
            )
            runner = rig.gateway._app_runner
            assert runner is not None
            assert runner.server is not None
            served = runner.server
            await until(lambda: bool(served.connections))
            await until(lambda: not served.connections)


@pytest.mark.parametrize("turns", range(8))
async def test_who_comes_at_the_moment_of_closing_is_sent_away(turns: int) -> None:
    """However far it was let in: a socket that is left open is a warning, and so an error here."""

    async def answer(request: web.BaseRequest) -> web.Response:
        raise AssertionError("nothing was asked")

    accepting, server = connections.Connections(8), web.Server(answer)
    port = accepting.listen("127.0.0.1", 0)
    accepting.accept(server)
    await asyncio.sleep(0)
    with socket.create_connection(("127.0.0.1", port)) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        await accepting.close()
        await server.shutdown(0.1)
        client.setblocking(False)
        with suppress(ConnectionResetError):
            async with asyncio.timeout(10):
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_a_port_that_is_taken_is_named(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:.*; give another"):
            await Gateway(store, port=port_of(rig)).start()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.5", ("10.0.0.5", 0)),
        ("trainer.example:8100", ("trainer.example", 8100)),
        ("[fd00::5]:8100", ("fd00::5", 8100)),
    ],
)
def test_where_a_gateway_is_to_listen(text: str, place: tuple[str, int]) -> None:
    assert read_place(text) == place


@pytest.mark.parametrize(
    "text",
    ["", "http://10.0.0.5", "10.0.0.5/x", "me@10.0.0.5", "10.0.0.5:99999", "[x", ":80", "h:p", 7],
)
def test_what_is_no_place(text: Any) -> None:
    with pytest.raises(ConfigError, match=r'^gateway=.* is no address: give "HOST"'):
        read_place(text)


@pytest.mark.parametrize("text", ["0.0.0.0", "0.0.0.0:80", "[::]:80"])
def test_every_address_is_none_to_be_told(text: str) -> None:
    with pytest.raises(ConfigError, match=r"others have to be told one"):
        read_place(text)


async def test_both_addresses_of_a_name_have_one_port(store: Store) -> None:
    async with Gateway(store, host="localhost") as gateway, aiohttp.ClientSession() as session:
        for host in ("127.0.0.1", "localhost"):
            url = gateway.url.replace("localhost", host)
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 200


def test_a_server_lets_itself_open_as_many_files_as_it_may() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1_000, before[1]))
        raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft == (16_384 if hard == resource.RLIM_INFINITY else min(16_384, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        raise_file_limit()  # what is allowed already is not taken away
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
