"""The plugin of `postgresql://` URLs (`StorePlugin`)."""

from __future__ import annotations

from lightspan.stores.protocol import Store
from lightspan_cluster.postgres import dsn

IS_SHARED = True


def make_store(url: str, *, create: bool) -> Store:
    """See `StorePlugin.make_store`."""
    from lightspan_cluster.postgres.store import PostgresStore

    return PostgresStore(url, create=create)


def public_url(url: str) -> str:
    """See `StorePlugin.public_url`."""
    return dsn.read_address(url).url


def take_credentials(url: str) -> None:
    """See `StorePlugin.take_credentials`: libpq reads its variables in every process anew."""


def relay_url(url: str) -> str:
    """See `StorePlugin.relay_url`: a database relays nothing."""
    del url
    return ""
