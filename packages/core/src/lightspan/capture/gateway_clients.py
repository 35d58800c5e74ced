"""Clean clients of ours, which carry a call to the gateway: one per SDK and origin.

Nothing of the environment and nothing of the app's own client travels along.
"""

from __future__ import annotations

import asyncio
import atexit
import ssl
from collections.abc import AsyncGenerator
from typing import Any, Final

from lightspan.capture._globals import state
from lightspan.capture.sdks import OPENAI, Sdk

_CLEAN: Final = "_lightspan_clean"


def is_clean(client: Any) -> bool:
    """Whether it is one of ours: its requests are on their way already."""
    return getattr(client, _CLEAN, False)


def mark_clean(client: Any) -> None:
    """A client of ours, whose calls are no app's: they are neither recorded nor sent elsewhere."""
    setattr(client, _CLEAN, True)


def sync_client(sdk: Sdk, origin: str) -> Any:
    """The client of this process."""
    key = (sdk.name, origin)
    with state.lock:
        if key not in state.clients:
            if not state.clients:
                atexit.register(close)
            http = sdk.module().DefaultHttpxClient(trust_env=False, **_trust(origin))
            kind = getattr(sdk.module(), sdk.client)
            state.clients[key] = _bare(sdk, kind, origin, http)
        return state.clients[key]


class AsyncClient:
    """A clean client of one event loop, closed when the loop shuts its generators down.

    `asyncio.run` does that before it closes the loop; nobody else would tell us.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._keeper = self._keep()

    async def open(self) -> None:
        await anext(self._keeper)

    async def close(self) -> None:
        await self._keeper.aclose()

    async def _keep(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self.client.close()


async def async_client(sdk: Sdk, origin: str) -> Any:
    """The client of the running event loop."""
    key = (sdk.name, origin)
    clients = state.async_clients.setdefault(asyncio.get_running_loop(), {})
    if key not in clients:
        http = sdk.module().DefaultAsyncHttpxClient(trust_env=False, **_trust(origin))
        kind = getattr(sdk.module(), f"Async{sdk.client}")
        clients[key] = made = AsyncClient(_bare(sdk, kind, origin, http))
        await made.open()
    return clients[key].client


def _trust(origin: str) -> dict[str, Any]:
    """Whom a client trusts: the system's authorities and the one in `SSL_CERT_FILE`, as the store's
    client does. httpx has a list of its own and, without `trust_env`, looks at no variable."""
    return {"verify": ssl.create_default_context()} if origin.startswith("https://") else {}


def _bare(sdk: Sdk, kind: Any, origin: str, http: Any) -> Any:
    """A client that carries nothing of the environment: no organisation, project or headers."""
    base_url = origin.rstrip("/") + sdk.base
    client = kind(api_key="per-call", base_url=base_url, http_client=http)
    if sdk is OPENAI:
        client.organization = client.project = None
    else:
        client.auth_token = None  # older versions read it where a key is given too
    client._custom_headers = {}
    mark_clean(client)
    return client


async def aclose() -> None:
    """Close the clients of the running loop (a runner calls this before its loop ends)."""
    clients = state.async_clients.pop(asyncio.get_running_loop(), {})
    for client in clients.values():
        await client.close()


def close() -> None:
    """Close the synchronous clients."""
    with state.lock:
        clients = list(state.clients.values())
        state.clients.clear()
    for client in clients:
        client.close()
