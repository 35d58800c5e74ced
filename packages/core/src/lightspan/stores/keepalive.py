"""Sockets that notice when the machine at the other end is gone.

A model may think for an hour, in which its connection carries nothing. A machine without power or
network says nothing either, and who waits for it would wait for ever.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

_OPTIONS: Final[Mapping[str, int]] = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""Seconds of silence until the other end is asked whether it is there, seconds between questions,
and questions without an answer after which it is gone: 70 s in all."""


def watched(address: Sequence[Any]) -> socket.socket:
    """A socket for that address (an item of `getaddrinfo`), not yet connected."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        option = getattr(socket, name, None)  # systems have names of their own for some
        if option is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


__all__ = ["watched"]
