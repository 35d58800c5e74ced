"""The plugin of `postgresql://` URLs (`StorePlugin`)."""

from __future__ import annotations

from lightspan.stores.postgres import address
from lightspan.stores.protocol import Store

IS_SHARED = True


def make_store(url: str, *, create: bool) -> Store:
    """See `StorePlugin.make_store`."""
    from lightspan.stores.postgres.store import PostgresStore

    return PostgresStore(url, create=create)


def public_url(url: str) -> str:
    """See `StorePlugin.public_url`."""
    return address.read_address(url).url


def take_credentials(url: str) -> None:
    """See `StorePlugin.take_credentials`: libpq reads its variables in every process anew."""


def relay_url(url: str) -> str:
    """See `StorePlugin.relay_url`: a database relays nothing."""
    del url
    return ""
