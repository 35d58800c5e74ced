"""Stores of rollouts, attempts, spans, token records and resources.

Runners and the gateway write to a store, and the learner reads from it. Most code needs only
`open_store`.

- `protocol` defines the methods of a store.
- `memory` is a store for one process, `sqlite` one file for every process of one machine. Plugins
  add others by URL scheme (PostgreSQL, HTTP).
- `_state_machine` changes the status of rollouts and attempts.
- `_leases` grants, extends and ends leases, and makes claims repeatable.
- `_encoding` serialises records.
- `_signal` wakes coroutines that wait for a change.
- `_process_local` opens connections per process; `_sql` has the shared parts of SQL stores.
- `credentials` keeps passwords out of URLs; `aio` runs a store from synchronous code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from lightspan.errors import ConfigError, NotFoundError
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.stores.protocol import Store, StorePlugin

_SUFFIXES: Final = (".db", ".sqlite")
_OWN_SCHEMES: Final = ("memory", "sqlite")
_KNOWN_SCHEMES: Final = ("postgresql", "http", "https")
"""Schemes of lightspan's plugins: an error says how to install one that is missing."""
_POWER_LOSS: Final = "power_loss=true"
_ALTERNATIVES: Final = (
    "use 'memory:' (this process only), 'sqlite:///absolute/path.db', 'sqlite:relative/path.db', "
    "a path that ends in .db or .sqlite, 'postgresql://user@host/database', 'https://host:port', "
    "or the scheme of an installed plugin (docs/reference/plugins.md)"
)


def open_store(url: str | os.PathLike[str], *, patience_s: float | None = None) -> Store:
    """Return the store of a URL without opening it: use `async with`, or call its `open`.

    - `memory:` is a new store each time.
    - `sqlite:…` is a file. With `?power_loss=true` it survives not only `kill -9` but also a power
      loss, at the price of one disk flush per transaction.
    - `postgresql://user@host/database` is the schema `lightspan` of the database, or the schema in
      `?schema=…`. It needs `lightspan[postgres]`.
    - `https://host:port` is the store that `lightspan serve --store` serves there. It needs
      `lightspan[http]`. Its key is in the environment variable `LIGHTSPAN_STORE_KEY`, or in the
      variable that `?api_key_env=…` names.

    Args:
        url: URL or file of the store.
        patience_s: seconds for which an operation is retried while the store's server is
            unreachable; None for the store's own time, up to a minute.

    Raises:
        ConfigError: the URL names no store, or the package that it needs is not installed.
    """
    store = _make_store(os.fspath(url), create=True)
    if patience_s is not None and (set_patience := getattr(store, "set_patience", None)):
        set_patience(patience_s)
    return store


def _make_store(text: str, *, create: bool) -> Store:
    text, plugin = _plugin(text)
    if plugin is not None:
        return plugin.make_store(text, create=create)
    if text in ("memory:", "memory://"):
        from lightspan.stores.memory import MemoryStore

        return MemoryStore()
    path, power_loss = _sqlite_path(text)
    from lightspan.stores.sqlite import SQLiteStore

    return SQLiteStore(path, power_loss=power_loss)


def _plugin(url: str) -> tuple[str, StorePlugin | None]:
    """Return a URL as `_normalized` does, and the plugin that implements its scheme.

    The plugin is None if this package implements the scheme, or if the URL has no known scheme.

    Raises:
        ConfigError: the scheme's plugin cannot be loaded, or its package is not installed.
    """
    text = _normalized(url)
    scheme, separator, _ = text.partition("://")
    if not separator or scheme in _OWN_SCHEMES or not scheme.isidentifier():
        return text, None
    if scheme not in installed_plugins("stores") and scheme not in _KNOWN_SCHEMES:
        return text, None  # `_sqlite_path` lists the schemes in its error
    return text, load_plugin("stores", scheme)


def open_existing(url: str | os.PathLike[str], *, read_only: bool = False) -> Store:
    """Return the store of a URL, which must exist, without opening it.

    Args:
        url: URL or file of the store.
        read_only: whether the store is only read. Each method that writes then raises `StoreError`.
            Nothing in the folder of a SQLite file is changed, so the file may be another user's or
            on a read-only disk. A session with PostgreSQL refuses to write. A served store needs
            only a reader's key.

    Raises:
        ConfigError: the URL names no store, or its stores cannot be opened for reading only.
        NotFoundError: the file does not exist or is empty. For a database, `Store.open` raises this
            error.
    """
    store = _make_store(os.fspath(url), create=False)
    path: Path | None = getattr(store, "path", None)
    # `Path.exists` raises for some paths. Opening an empty file would make a store of it.
    if path is not None and not (os.path.exists(path) and os.path.getsize(path)):
        raise NotFoundError(f"there is no store {path}: nothing was recorded there")
    if read_only:
        if not hasattr(store, "read_only"):
            raise ConfigError(f"store {store.url} cannot be opened for reading only")
        store.read_only = True
    return store


def names_store(text: str) -> bool:
    """Return whether a text looks like a store's URL or file rather than a folder."""
    scheme, separator, _ = _normalized(text).partition(":")
    schemes = {*_OWN_SCHEMES, *_KNOWN_SCHEMES, *installed_plugins("stores")}
    return bool(separator and scheme in schemes) or text.partition("?")[0].endswith(_SUFFIXES)


def public_url(url: str | os.PathLike[str]) -> str:
    """Return a store's URL without its password, which stays in this process's memory.

    In this process the result opens the same store (`credentials`).

    Raises:
        ConfigError: the URL cannot be read.
    """
    text, plugin = _plugin(os.fspath(url))
    return text if plugin is None else plugin.public_url(text)


def take_credentials(url: str) -> None:
    """Move a URL's credentials from environment variables to the memory of this process.

    Apps that are loaded later and processes that are started later then cannot read them.

    Raises:
        ConfigError: a variable that the URL names is not set.
    """
    text, plugin = _plugin(url)
    if plugin is not None:
        plugin.take_credentials(text)


def relay_url(url: str) -> str:
    """Return the URL at which the store's server forwards model calls to the gateway.

    The result is empty if the store has no server.
    """
    text, plugin = _plugin(url)
    return "" if plugin is None else plugin.relay_url(text)


def is_shared(url: str) -> bool:
    """Return whether processes on several machines can open the store of a URL."""
    _, plugin = _plugin(url)
    return plugin is not None and plugin.IS_SHARED


def _normalized(text: str) -> str:
    """Return the URL with its scheme in lower case, and `postgresql` for the alias `postgres`."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text
    scheme = scheme.lower()
    return f"{'postgresql' if scheme == 'postgres' else scheme}://{rest}"


def _sqlite_path(url: str) -> tuple[str, bool]:
    name, _, option = url.partition("?")
    shown = re.sub(r":[^:]*@", ":…@", url)  # a URL of another scheme may have a password
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
