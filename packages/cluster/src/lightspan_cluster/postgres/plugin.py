"""The plugin for `postgresql://` URLs (`StorePlugin`)."""

from __future__ import annotations

from lightspan.stores.protocol import Store
from lightspan_cluster.postgres import dsn

IS_SHARED = True


def make_store(url: str, *, create: bool) -> Store:
    """Return the store of a URL (`StorePlugin.make_store`)."""
    from lightspan_cluster.postgres.store import PostgresStore

    return PostgresStore(url, create=create)


def public_url(url: str) -> str:
    """Return the URL without its secrets (`StorePlugin.public_url`)."""
    return dsn.read_address(url).url


def take_credentials(url: str) -> None:
    """Do nothing, because libpq itself reads credentials from environment variables.

    See `StorePlugin.take_credentials`.
    """


def relay_url(url: str) -> str:
    """Return an empty text, because a database forwards no model calls to a gateway.

    See `StorePlugin.relay_url`.
    """
    del url
    return ""
