"""The stores: what joins the agents' world and the learner's.

In go rollouts to run and, from runners and the gateway, attempts with their spans, token records
and rewards; out come claims and, for the learner, what was recorded. `protocol` says what a store
does. `memory` is for one process, `sqlite` a file for every process of one machine, `postgres` a
database for those of many, `remote` one of these that another process serves over HTTP. What all
share: `_state_machine` moves rollouts and attempts, `_leases` gives, extends and loses an attempt's
lease, `_requests` lets a claim be repeated, `_arguments` refuses what no store can keep,
`_encoding` turns records into bytes, `_signal` wakes who waits for a change, `_opened` is what a
process has open; what those in SQL share is in `_sql`. `known_secrets` has what belongs to a URL
and is shown nowhere. `event_loop` uses a store from plain code, `sockets` notice when a machine is
gone. Most code needs only `open_store`, which imports a store when it is opened.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from lightspan.errors import ConfigError, NotFoundError
from lightspan.stores.postgres import address
from lightspan.stores.protocol import Store
from lightspan.stores.remote.address import names_server, read_address

__all__ = ["names_store", "open_existing", "open_store", "public_url"]

_SUFFIXES: Final = (".db", ".sqlite")
_POWER_LOSS: Final = "power_loss=true"
_ALTERNATIVES: Final = (
    "use 'memory:' (this process only), 'sqlite:///absolute/path.db', 'sqlite:relative/path.db', "
    "a path that ends in .db or .sqlite, 'postgresql://user@host/database', or 'https://host:port'"
)


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store that a URL names, not opened yet: use it in `async with`, or call its `open`.

    `memory:` is a new store each time. `sqlite:…?power_loss=true` survives a power loss as well as
    `kill -9`, at the price of one disk flush per transaction. `postgresql://user@host/database` is
    a schema of a database (`lightspan[postgres]`), `lightspan` or the one of `?schema=…`.
    `https://host:port` is what `lightspan serve --store` serves there (`lightspan[http]`); its key
    is in `LIGHTSPAN_STORE_KEY`, or in the variable of `?api_key_env=…`.

    Raises:
        ConfigError: the URL names no store, or what it needs is not installed.
    """
    return _named(os.fspath(url), create=True)


def _named(text: str, *, create: bool) -> Store:
    text = _with_scheme(text)
    if text.startswith(address.SCHEME):
        from lightspan.stores.postgres.store import PostgresStore

        return PostgresStore(text, create=create)
    if names_server(text):
        from lightspan.stores.remote.store import RemoteStore

        return RemoteStore(text)
    if text in ("memory:", "memory://"):
        from lightspan.stores.memory import MemoryStore

        return MemoryStore()
    path, power_loss = _sqlite_path(text)
    from lightspan.stores.sqlite import SQLiteStore

    return SQLiteStore(path, power_loss=power_loss)


def open_existing(url: str | os.PathLike[str]) -> Store:
    """`open_store` for a reader: a mistyped path is an error, and makes no empty store.

    Raises:
        ConfigError: the URL names no store.
        NotFoundError: it names a file that does not exist. A database says so when it is opened.
    """
    store = _named(os.fspath(url), create=False)
    path: Path | None = getattr(store, "path", None)
    if path is not None and not os.path.exists(path):  # `Path.exists` raises for some paths
        raise NotFoundError(f"there is no store {path}: nothing was recorded there")
    return store


def names_store(text: str) -> bool:
    """Whether a text looks like a store's URL or file rather than a folder."""
    schemes = ("memory:", "sqlite:", address.SCHEME)
    is_url = _with_scheme(text).startswith(schemes) or names_server(text)
    return is_url or text.partition("?")[0].endswith(_SUFFIXES)


def public_url(url: str | os.PathLike[str]) -> str:
    """A store's URL as it may be shown and written down: without its password, which this process
    remembers, so that it opens the same store.

    Raises:
        ConfigError: a `postgresql://` or `https://` URL that cannot be read.
    """
    text = _with_scheme(os.fspath(url))
    if names_server(text):
        return read_address(text).url
    return address.read_address(text).url if text.startswith(address.SCHEME) else text


def _with_scheme(text: str) -> str:
    """`postgres://` is libpq's other name for the same."""
    return re.sub(r"^postgres(ql)?://", address.SCHEME, text, flags=re.IGNORECASE)


def _sqlite_path(url: str) -> tuple[str, bool]:
    name, _, option = url.partition("?")
    shown = re.sub(r":[^:]*@", ":…@", url)  # another scheme's, perhaps with a password
    if option not in ("", _POWER_LOSS):
        raise ConfigError(f"store {shown!r}: no option {option!r}; the only one is {_POWER_LOSS!r}")
    path = name.removeprefix("sqlite:")
    if path == name and not (name.endswith(_SUFFIXES) and ":" not in name.partition("/")[0]):
        raise ConfigError(f"store {shown!r} is not known: {_ALTERNATIVES}")
    if path.startswith("//") and not path.startswith("///"):
        raise ConfigError(f"store {url!r} names a host; a file has three slashes: {_ALTERNATIVES}")
    path = path.removeprefix("//")
    path = path[1:] if path.startswith("//") else path  # sqlite:////absolute/path.db
    if not path or path.endswith("/"):
        raise ConfigError(f"store {url!r} names no file: {_ALTERNATIVES}")
    return path, bool(option)
