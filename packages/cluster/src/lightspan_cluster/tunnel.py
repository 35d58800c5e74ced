"""The encrypted connection from a runner's machine to the trainer (`lightspan runner --join`).

Store clients, SDK clients and programs in any language connect to an unencrypted port of this
machine. So they need not know the server's certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import socket
import ssl
from typing import Final, Self

from lightspan import __version__
from lightspan.errors import ConfigError, StoreError, StoreUnreachableError, how_to_install
from lightspan.schema.semconv import HEADER_PROTOCOL, HEADER_VERSION, PROTOCOL_VERSION
from lightspan_cluster.join_token import JoinToken, fingerprint

try:
    from lightspan_gateway.keepalive import keep_alive
    from lightspan_gateway.remote_store.errors import Failure
    from lightspan_gateway.remote_store.rpc import CONTENT_TYPE, encode
    from lightspan_gateway.remote_store.url import RELAY_PATH, keep_tunnel
except ImportError as error:
    raise ConfigError(f"--join needs {error.name!r}: {how_to_install('hosts')}") from error

CONNECT_TIMEOUT_S: Final = 10.0
_REFUSAL_TIMEOUT_S: Final = 5.0
"""Seconds until a client has sent its request, and until it has read the refusal."""
_CHUNK: Final = 2**16


class Tunnel:
    """Forward connections from a loopback port to a server, by TLS.

    Args:
        join: address of the server, and the fingerprint that its certificate must have.
    """

    def __init__(self, join: JoinToken) -> None:
        self._join = join
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # The fingerprint identifies the server, in place of a name and an authority.
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def keep(self) -> str:
        """Make store clients of this process and its children use the tunnel.

        Returns:
            The URL of the store.
        """
        assert self._server is not None
        url, port = f"https://{self._join.place}", self._server.sockets[0].getsockname()[1]
        keep_tunnel(url, f"http://127.0.0.1:{port}", self._join.key)
        return url

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer = None
        try:
            far_reader, far_writer = await self._connect()
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except StoreError as error:
            await _refuse(reader, writer, error)
        finally:
            writer.close()
            if far_writer is not None:
                far_writer.transport.abort()  # a server that is gone would not answer a farewell

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to the server.

        Raises:
            StoreUnreachableError: nothing answers there.
            StoreError: the server there has another certificate. Nothing was sent to it.
        """
        join = self._join
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    join.host, join.port, ssl=self._context, limit=_CHUNK
                )
        except ssl.SSLError as error:
            raise StoreError(
                f"what answers at {join.place} is no trainer with runners=Hosts() ({error.reason}):"
                " compare host and port with the line that the trainer prints"
            ) from error
        except OSError as error:  # TimeoutError too
            reason = error.strerror or str(error) or f"no answer within {CONNECT_TIMEOUT_S:g} s"
            if error.errno is not None and not isinstance(error, socket.gaierror):
                reason = os.strerror(error.errno)  # asyncio has another text
            raise StoreUnreachableError(
                f"the trainer at {join.place} cannot be reached ({reason}): it has not started or "
                "has ended, or a firewall is in between"
            ) from error
        keep_alive(writer.get_extra_info("socket"))
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if not hmac.compare_digest(fingerprint(certificate), join.fingerprint):
            writer.transport.abort()
            raise StoreError(
                f"the server at {join.place} has another certificate than the token names, so "
                "nothing was sent to it: copy the line that the trainer prints again; if it is the "
                "same line, another program listens there or intercepts the connection"
            )
        return reader, writer


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy what arrives until one side closes its connection, then close the other one."""
    with contextlib.suppress(OSError):  # one side disconnected; errors of TLS too
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _refuse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: StoreError
) -> None:
    """Answer a request with an error, as the store's server would, and close the connection."""
    status = "502 Bad Gateway" if isinstance(error, StoreUnreachableError) else "403 Forbidden"
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_REFUSAL_TIMEOUT_S):
            request = await reader.read(_CHUNK)
            kind, body = CONTENT_TYPE, encode(Failure.of(error))
            if f" {RELAY_PATH}/".encode() in request.partition(b"\r\n")[0]:  # a model call
                kind = "application/json"
                body = json.dumps({"error": {"message": str(error)}}).encode()
            head = (
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                f"{HEADER_PROTOCOL}: {PROTOCOL_VERSION}\r\n{HEADER_VERSION}: {__version__}\r\n"
                "Connection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            writer.write_eof()
            while await reader.read(_CHUNK):  # unread bytes would reset the connection
                pass
