"""Messages over a socket, each preceded by its length, and `exit_with_parent`."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Final

_LENGTH: Final = struct.Struct(">Q")


def send(link: socket.socket, data: bytes) -> None:
    """Write `data` to the socket as one message."""
    link.sendall(_LENGTH.pack(len(data)))
    link.sendall(data)


def receive(link: socket.socket) -> bytes | None:
    """Return the next message from the socket; None if the other side has closed it."""
    head = _exactly(link, _LENGTH.size)
    return None if head is None else _exactly(link, _LENGTH.unpack(head)[0])


def _exactly(link: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = link.recv(min(count - len(parts), 2**20))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def exit_with_parent() -> None:
    """Wait until standard input is closed, then exit the process. Call this in a thread.

    The parent process keeps the input open. It is closed when the parent ends or is killed.
    """
    sys.stdin.buffer.read()
    os._exit(0)
