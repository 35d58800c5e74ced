"""Check whether a gateway answers, at its own address or through the store's server."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from typing import Final, NamedTuple

_TIMEOUT_S: Final = 5.0
"""Maximum seconds until the gateway answers, perhaps through a store's server."""
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""HTTP client that ignores HTTP_PROXY, as the client of the store does."""


class GatewayEndpoint(NamedTuple):
    """The address to which an attempt sends its model calls, and the token for it."""

    url: str
    """Base URL of the gateway, or of the store's server that relays calls to it."""
    call_token: str
    """The attempt's call token. A store's server finds the gateway by the token. After the end of
    the attempt, the token gives no access."""

    async def is_open(self) -> bool:
        """Return whether the gateway answers a request with a status below 500."""
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
