"""HTTP as a store's client speaks it, with servers that answer in every way that HTTP has, and in
some that it has not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from lightspan.runners.reachability import Way
from lightspan.stores.remote import exchanges
from lightspan.stores.remote.exchanges import Exchanges, NoAnswer

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Scripted:
    """A server that gives these answers, one to each request, whatever connection it comes by.

    After one that is empty it says nothing more; after one that ends in `CLOSE` it hangs up.
    """

    CLOSE = b"<close>"

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.asked: list[bytes] = []
        """The head of each request."""
        self.connections = 0
        self.reads_bodies = True

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.asked.append(head)
                for line in head.lower().splitlines():
                    if line.startswith(b"content-length:") and self.reads_bodies:
                        await reader.readexactly(int(line.split(b":")[1]))
                answer = self._answers.pop(0)
                writer.write(answer.removesuffix(self.CLOSE))
                await writer.drain()
                if answer.endswith(self.CLOSE):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def speaking(*answers: bytes, path: str = "") -> AsyncIterator[tuple[Exchanges, Scripted]]:
    scripted = Scripted(*answers)
    server = await asyncio.start_server(scripted.take, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Exchanges(f"http://127.0.0.1:{port}{path}", {"X-Key": "word"})
    try:
        yield client, scripted
    finally:
        await client.close()
        server.close()


async def test_a_connection_is_kept() -> None:
    async with speaking(OK, OK, OK, path="/a b") as (client, server):
        assert (await client.ask("GET", "/x", silence_s=9)).body == b"ok"
        assert (await client.ask("POST", "/y", b"body", silence_s=9)).status == 200
        assert server.connections == 1
        await client.ask("GET", "", silence_s=9, anew=True)
        assert server.connections == 2
    first, second, third = server.asked
    assert first.startswith(b"GET /a%20b/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nX-Key: word\r\n" in first
    assert b"Content-Length" not in first
    assert b"\r\nContent-Length: 4\r\n" in second
    assert third.startswith(b"GET /a%20b HTTP/1.1\r\n")


UNASKED = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nno"
"""Of an answer that nobody asked for, all but the end."""


async def test_what_nobody_asked_for_is_no_part_of_the_next_answer() -> None:
    """It comes with an answer."""
    async with speaking(OK + UNASKED, OK) as (client, server):
        for _ in range(2):
            assert (await client.ask("GET", "", silence_s=9)).body == b"ok"
        assert server.connections == 2


async def test_a_connection_that_says_what_nobody_asked_for_is_not_used_again() -> None:
    """It comes while nothing is asked."""
    later, gone = asyncio.Event(), asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await later.wait()
        writer.write(UNASKED)
        assert await reader.read() == b""
        gone.set()
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        client = Exchanges(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
        assert (await client.ask("GET", "", silence_s=9)).body == b"ok"
        later.set()
        await asyncio.wait_for(gone.wait(), 9)
        assert (await client.ask("GET", "", silence_s=9)).body == b"ok"
        await client.close()


async def test_several_at_once_have_a_connection_each() -> None:
    async with speaking(*[OK] * 6) as (client, server):
        for _ in range(2):
            await asyncio.gather(*(client.ask("GET", "", silence_s=9) for _ in range(3)))
        assert server.connections == 3


async def test_a_connection_that_nobody_needs_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "_KEPT_S", 0.02)
    async with speaking(OK) as (client, _):
        await client.ask("GET", "", silence_s=9)
        [connection] = client._all
        await asyncio.wait_for(connection.ended, 9)
        assert not client._idle


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (
            CHUNKED + b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n",
            b"abcde",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil it ends" + Scripted.CLOSE, b"until it ends"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na" + Scripted.CLOSE, b"a"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", b"a"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
    ids=["chunks", "to the end", "1.0", "go on", "nothing"],
)
async def test_bodies(answer: bytes, body: bytes) -> None:
    async with speaking(answer, OK) as (client, _):
        assert (await client.ask("GET", "", silence_s=9)).body == body
        assert (await client.ask("GET", "", silence_s=9)).body == b"ok"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "what is no HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 40_000, "what is no HTTP: its headers do not end"),
        (
            b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
            "something else",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab" + Scripted.CLOSE, "was closed before"),
        (
            CHUNKED + b"5\r\nab" + Scripted.CLOSE,
            "closed before",
        ),
        (Scripted.CLOSE, "was closed before"),
        (b"", "no answer for 0.2 s"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", "no answer for 0.2 s"),
    ],
)
async def test_answers_that_are_none(answer: bytes, reason: str) -> None:
    async with speaking(answer, OK) as (client, server):
        with pytest.raises(NoAnswer, match=reason):
            await client.ask("GET", "", silence_s=0.2)
        assert (await client.ask("GET", "", silence_s=9)).body == b"ok"
        assert server.connections == 2


async def test_an_answer_that_trickles_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is what ends it, or the end of all patience."""

    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for letter in b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok":
                writer.write(bytes([letter]))
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    client = Exchanges(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
    assert (await client.ask("GET", "", silence_s=0.5)).body == b"ok"
    monkeypatch.setattr(exchanges, "WHOLE_S", 0.3)
    with pytest.raises(NoAnswer, match=r"no whole answer within 0\.3 s"):
        await client.ask("GET", "", silence_s=0.25, anew=True)
    await client.close()
    server.close()


async def test_a_large_body_arrives() -> None:
    async with speaking(OK, OK) as (client, server):
        await client.ask("POST", "", bytes(20 * 2**20), silence_s=9)
        await client.ask("GET", "", silence_s=9)
        assert server.connections == 1


async def test_a_large_body_that_the_server_does_not_want() -> None:
    """It says so before it has all of it; the connection is of no use then."""
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    async with speaking(refusal, OK) as (client, server):
        server.reads_bodies = False
        answer = await client.ask("POST", "", bytes(20 * 2**20), silence_s=9)
        assert (answer.status, answer.body) == (413, b"no")
        assert (await client.ask("GET", "", silence_s=9)).body == b"ok"
        assert server.connections == 2


async def test_who_leaves_takes_the_connection_along() -> None:
    async with speaking(b"", OK) as (client, server):
        asking = asyncio.create_task(client.ask("GET", "", silence_s=9))
        while not server.asked:  # noqa: ASYNC110  it is the server that says so
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await client.ask("GET", "", silence_s=9)).body == b"ok"
        assert server.connections == 2


@pytest.mark.parametrize("url", ["http://a..b", f"http://{'a' * 64}.example"])
def test_hosts_that_cannot_be(url: str) -> None:
    with pytest.raises(ValueError, match="label"):
        Exchanges(url, {})


@pytest.mark.parametrize(
    ("answer", "is_open"),
    [
        (OK, True),
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n", False),
        (b"no HTTP at all\r\n\r\n", False),
    ],
)
async def test_whether_a_relay_reaches_the_gateway(answer: bytes, is_open: bool) -> None:
    server = Scripted(answer)
    listening = await asyncio.start_server(server.take, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/gateway"
    assert await Way(url, "the-token").is_open() is is_open
    listening.close()
    [head] = server.asked
    assert head.startswith(b"GET /gateway/health HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer the-token\r\n" in head


async def test_a_relay_that_is_away(unused_tcp_port_factory: Callable[[], int]) -> None:
    assert not await Way(f"http://127.0.0.1:{unused_tcp_port_factory()}", "the-token").is_open()
