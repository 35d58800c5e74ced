"""Find this machine's addresses, and refuse requests that web pages of other hosts send to a server
without a key."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from lightspan_gateway.api_errors import ApiError

_NOWHERE: Final = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737), to which no packet is sent."""


def own_address() -> str:
    """Return the address from which this machine reaches other networks, or that of its name.

    The result is empty if it has neither.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_NOWHERE)  # asks the routing table
            return str(probe.getsockname()[0])
        except OSError:
            pass
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if is_loopback(address) else address


def is_loopback(host: str) -> bool:
    """Return whether the name or address is a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_local(request: web.Request, advice: str) -> None:
    """Check that a request to a server without a key was not sent by a web page of another host.

    Such a page could otherwise reach the server by DNS rebinding.

    Args:
        request: the request.
        advice: text for the error that describes how to start the server with a key.

    Raises:
        ApiError: 403 if the request's host or origin is not this machine.
    """
    for url in (f"//{request.host}", request.headers.get("Origin")):
        if url is not None and not is_loopback(_host_of(url)):
            raise ApiError(
                403,
                f"a request for or from {_host_of(url)!r} is refused: without a key this endpoint "
                f"accepts programs of this machine only ({advice})",
            )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
