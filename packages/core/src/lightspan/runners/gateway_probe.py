"""Health probe of a gateway, at its own address or through the store's server."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from typing import Final, NamedTuple

_TIMEOUT_S: Final = 5.0
"""Seconds for an answer, which a store's server may relay to the gateway."""
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores HTTP_PROXY, as the client of the store does."""


class GatewayEndpoint(NamedTuple):
    """The address of an attempt's model calls."""

    url: str
    """Base URL of the gateway, or of the store's server that relays calls to it."""
    call_token: str
    """The attempt's call token, by which such a server finds the gateway. The token of an attempt
    that has ended opens nothing else."""

    async def is_open(self) -> bool:
        """Return whether a call would reach the gateway."""
        return await asyncio.to_thread(self._probe)

    def _probe(self) -> bool:
        headers = {"Authorization": f"Bearer {self.call_token}"}
        try:
            request = urllib.request.Request(f"{self.url}/health", headers=headers)
            _OPENER.open(request, timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            return error.code < 500
        except (OSError, http.client.HTTPException, ValueError):
            return False
        return True
