"""Tests of the HTTP server: idle connections, ports, addresses, open files."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from lightspan.errors import ConfigError
from lightspan.stores.protocol import Store
from lightspan_gateway import Gateway
from lightspan_gateway.http_server import check_port, raise_file_limit
from lightspan_gateway.limits import GatewayLimits
from lightspan_testing.gateway_suite import Rig, make_rig


def port_of(rig: Rig) -> int:
    return int(rig.gateway.url.rpartition(":")[2])


async def health(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send one more request on the connection; return the first line of the answer."""
    writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-len"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head.partition(b"\r\n")[0]


async def test_a_connection_that_idles_is_closed(store: Store) -> None:
    """Check an unused connection, a used one, and one with incomplete headers."""
    async with make_rig(store, "ok", limits=GatewayLimits(keepalive_s=0.3)) as rig:
        opened = [await asyncio.open_connection("127.0.0.1", port_of(rig)) for _ in range(3)]
        unused, used, dribbling = opened
        assert await health(*used) == b"HTTP/1.1 200 OK"
        dribbling[1].write(b"GET /health HTTP/1.1\r\nHost: a\r\nX: ")
        closed = asyncio.gather(*(reader.read() for reader, _ in (unused, used)))
        assert await closed == [b"", b""]
        reader, writer = dribbling
        while not (reader.at_eof() or reader.exception()):
            writer.write(b"a")
            await asyncio.sleep(0.05)
        for _, writer in opened:
            writer.transport.abort()
        await asyncio.sleep(0)


@pytest.mark.parametrize("iterations", range(5))
async def test_a_connection_that_is_accepted_at_the_last_moment_is_closed(
    store: Store, iterations: int
) -> None:
    """Check that no connection stays open, however far its acceptance was when the server closed.

    Python would warn of an `unclosed transport`.
    """
    async with make_rig(store, "ok") as rig:
        with socket.create_connection(("127.0.0.1", port_of(rig))) as client:
            client.setblocking(False)
            for _ in range(iterations):
                await asyncio.sleep(0)
            await rig.gateway.close()
            loop = asyncio.get_running_loop()
            with suppress(ConnectionResetError):  # it was still in the backlog
                assert await asyncio.wait_for(loop.sock_recv(client, 1), 5.0) == b""


async def test_a_port_that_is_taken_is_named(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:.*; give another"):
            await Gateway(store, port=port_of(rig)).start()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:.*; give another"):
            check_port("127.0.0.1", port_of(rig))


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
        raise_file_limit()  # a higher limit is not lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
