"""Whether the gateway of an attempt can be reached: at its own address, or by the store's server.

Where the server hands calls on, that it listens says nothing about the gateway: it is asked, with
the token of the attempt that was lost, which opens nothing else any more.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple
from urllib.parse import urlsplit

PROBE_S: Final = 0.5
"""How often a gateway that did not answer is tried, and how long its port may take."""
_ANSWER_S: Final = 5.0
"""How long a server may take that asks the gateway in turn."""


class Way(NamedTuple):
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
    # where a store is served, the runner has what its client needs
    from lightspan.stores.remote.client import probe

    status = await probe(f"{url}/health", {"Authorization": f"Bearer {token}"}, _ANSWER_S)
    return 0 < status < 500
