"""This machine only: its addresses, and requests that come from no web page of elsewhere."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from lightspan_gateway.api_errors import ApiError


def is_loopback(host: str) -> bool:
    """Whether only this machine is behind that name or address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_local(request: web.Request, advice: str) -> None:
    """Without a key: no web page of elsewhere that a browser on this machine has open.

    Raises:
        ApiError: 403, with the advice how to let it in all the same.
    """
    for url in (f"//{request.host}", request.headers.get("Origin")):
        if url is not None and not is_loopback(_host_of(url)):
            raise ApiError(
                403,
                f"a request for or from {_host_of(url)!r} is refused: without a key this endpoint "
                f"is for programs of this machine ({advice})",
            )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
