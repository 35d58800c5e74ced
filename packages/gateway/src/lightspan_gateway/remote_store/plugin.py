"""The plugin of `http://` and `https://` URLs (`StorePlugin`)."""

from __future__ import annotations

from lightspan.stores.protocol import Store
from lightspan_gateway.remote_store.url import RELAY_PATH, read_address, take_key

IS_SHARED = True


def make_store(url: str, *, create: bool) -> Store:
    """See `StorePlugin.make_store`; the server creates its store, so `create` is ignored."""
    from lightspan_gateway.remote_store.store import RemoteStore

    return RemoteStore(url)


def public_url(url: str) -> str:
    """See `StorePlugin.public_url`."""
    return read_address(url).url


def take_credentials(url: str) -> None:
    """See `StorePlugin.take_credentials`."""
    take_key(url)


def relay_url(url: str) -> str:
    """See `StorePlugin.relay_url`."""
    return f"{read_address(url).base}{RELAY_PATH}"
