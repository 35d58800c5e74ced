"""Raw requests to a store's server."""

from __future__ import annotations

import socket
from typing import Any
from urllib import error as refused, request

import msgspec

from lightspan.schema.semconv import HEADER_PROTOCOL, PROTOCOL_VERSION
from packages.gateway.tests.remote_store.served import TRAINER


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


def begun(url: str, path: str, start: bytes, **headers: object) -> socket.socket:
    """Return the connection of a request whose body is sent only in part."""
    host, port = url.removeprefix("http://").split(":")
    defaults = {"Host": host, HEADER_PROTOCOL: PROTOCOL_VERSION}
    defaults |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in defaults.items())]
    connection = socket.create_connection((host, int(port)))
    connection.sendall("\r\n".join([*lines, "", ""]).encode("latin1") + start)
    return connection


def packed(**arguments: Any) -> bytes:
    return msgspec.msgpack.encode(arguments)
