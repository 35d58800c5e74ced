"""Sockets with TCP keepalive, which detect that the other machine no longer answers.

A connection carries no data while a model generates, which may take an hour. If the other machine
loses power or network meanwhile, nothing arrives either. Without keepalive, this side would then
wait forever.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

_OPTIONS: Final[Mapping[str, int]] = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""Idle seconds before the first probe, seconds between probes, and the number of unanswered probes
after which the connection is closed: 70 s in all."""


def keepalive_socket(address: Sequence[Any]) -> socket.socket:
    """Return an unconnected socket with keepalive for an address (an item of `getaddrinfo`)."""
    connection = socket.socket(*address[:3])
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Let a TCP connection send probes while it carries no data."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:  # some systems lack some of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
