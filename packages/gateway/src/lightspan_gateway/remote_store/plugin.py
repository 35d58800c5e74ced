"""The plugin by which `open_store` opens `http://` and `https://` URLs (`StorePlugin`)."""

from __future__ import annotations

from lightspan.stores.protocol import Store
from lightspan_gateway.remote_store.url import RELAY_PATH, read_address, take_key

IS_SHARED = True


def make_store(url: str, *, create: bool) -> Store:
    """Return the store at `url`. `create` is ignored, because only the server creates stores."""
    from lightspan_gateway.remote_store.store import RemoteStore

    return RemoteStore(url)


def public_url(url: str) -> str:
    """Return `url` in the form for messages and logs, without secrets."""
    return read_address(url).url


def take_credentials(url: str) -> None:
    """Read the key of the store at `url`, and remove it from the environment."""
    take_key(url)


def relay_url(url: str) -> str:
    """Return the base URL at which the store's server takes model calls.

    The server forwards them to the gateway of the caller's training.
    """
    return f"{read_address(url).base}{RELAY_PATH}"
