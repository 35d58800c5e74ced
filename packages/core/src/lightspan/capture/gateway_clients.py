"""Keep clients that send model calls to the gateway: one for each SDK and gateway.

They are *clean*: they use nothing from the environment or from the app's own clients. An SDK is
OpenAI's or Anthropic's package. A gateway's *origin* is the scheme, host and port of its URL.
"""

from __future__ import annotations

import asyncio
import atexit
import ssl
from collections.abc import AsyncGenerator
from typing import Any

from lightspan.capture._globals import state
from lightspan.capture.sdks import OPENAI, Sdk


def is_clean(client: Any) -> bool:
    """Return whether a client is lightspan's own, which `mark_clean` has marked."""
    return getattr(client, "_lightspan_clean", False)


def mark_clean(client: Any) -> None:
    """Mark a client as lightspan's own: its calls are neither recorded nor redirected."""
    client._lightspan_clean = True


def sync_client(sdk: Sdk, origin: str) -> Any:
    """Return this process's client of an SDK for the gateway at `origin`; create it if necessary.

    The origin is the scheme, host and port of the gateway's URL.
    """
    key = (sdk.name, origin)
    with state.lock:
        if key not in state.clients:
            if not state.clients:
                atexit.register(close)
            http = sdk.module().DefaultHttpxClient(trust_env=False, **_tls_options(origin))
            state.clients[key] = _bare_client(sdk, getattr(sdk.module(), sdk.client), origin, http)
        return state.clients[key]


async def _close_at_shutdown(client: Any) -> AsyncGenerator[None, None]:
    """Close a client when its event loop shuts down, or at `aclose` of this generator.

    `asyncio.run` closes all asynchronous generators before it closes the loop. There is no other
    hook.
    """
    try:
        yield
    finally:
        await client.close()


async def async_client(sdk: Sdk, origin: str) -> Any:
    """Return the running event loop's client of an SDK for the gateway at `origin`.

    It is created if necessary. The origin is the scheme, host and port of the gateway's URL.
    """
    key = (sdk.name, origin)
    clients = state.async_clients.setdefault(asyncio.get_running_loop(), {})
    if key not in clients:
        http = sdk.module().DefaultAsyncHttpxClient(trust_env=False, **_tls_options(origin))
        client = _bare_client(sdk, getattr(sdk.module(), f"Async{sdk.client}"), origin, http)
        closer = _close_at_shutdown(client)
        clients[key] = client, closer
        await anext(closer)
    return clients[key][0]


def _tls_options(origin: str) -> dict[str, Any]:
    """Return httpx's options for TLS; empty if `origin` has no TLS.

    The client trusts the system's certificate authorities and those in the file `SSL_CERT_FILE`, as
    the store's client does. httpx would otherwise trust its own list alone, because `trust_env` is
    off.
    """
    return {"verify": ssl.create_default_context()} if origin.startswith("https://") else {}


def _bare_client(sdk: Sdk, kind: Any, origin: str, http: Any) -> Any:
    """Return a client for the gateway that uses nothing from the environment.

    It does not use the organization, the project or the headers that environment variables set.

    Args:
        sdk: the SDK of the client.
        kind: class of the client.
        origin: scheme, host and port of the gateway.
        http: client of httpx that sends the requests.
    """
    client = kind(api_key="per-call", base_url=origin.rstrip("/") + sdk.base, http_client=http)
    if sdk is OPENAI:
        client.organization = client.project = None
    else:
        client.auth_token = None  # older versions read it where a key is given too
    client._custom_headers = {}
    mark_clean(client)
    return client


async def aclose() -> None:
    """Close the clients of the running event loop. A runner calls it before its loop ends."""
    for _, closer in state.async_clients.pop(asyncio.get_running_loop(), {}).values():
        await closer.aclose()


def close() -> None:
    """Close the synchronous clients."""
    with state.lock:
        clients = list(state.clients.values())
        state.clients.clear()
    for client in clients:
        client.close()
