"""Whether the gateway of an attempt can be reached: at its own address, or by the store's server.

Where the server hands calls on, that it listens says nothing about the gateway: it is asked, with
the token of the attempt that was lost, which opens nothing else any more.
"""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from typing import Final, NamedTuple
from urllib.parse import urlsplit

PROBE_S: Final = 0.5
"""How often a gateway that did not answer is tried, and how long its port may take."""
_ANSWER_S: Final = 5.0
"""How long a server may take that asks the gateway in turn."""
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores HTTP_PROXY, as the client of the store does."""


class GatewayEndpoint(NamedTuple):
    """Of an attempt's model calls."""

    url: str
    """What paths are added to."""
    relay_token: str = ""
    """The attempt's call token, where the store's server hands its calls on; else empty."""

    async def is_open(self) -> bool:
        """Whether a call would arrive."""
        if self.relay_token:
            return await _is_relayed(self.url, self.relay_token)
        return await _listens(self.url)


async def _listens(url: str) -> bool:
    """Whether somebody accepts connections there."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, ValueError):
        return False
    writer.close()
    return True


async def _is_relayed(url: str, token: str) -> bool:
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {token}"})
    return await asyncio.to_thread(_status, request) < 500


def _status(request: urllib.request.Request) -> int:
    """Return the status of an answer; 599 for none."""
    try:
        with _OPENER.open(request, timeout=_ANSWER_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return 599
