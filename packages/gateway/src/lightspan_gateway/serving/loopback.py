"""Detect loopback addresses, and refuse requests that web pages of other hosts send to a server
without a key."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from lightspan_gateway.api_errors import ApiError


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
