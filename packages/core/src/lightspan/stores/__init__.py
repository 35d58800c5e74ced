"""The stores: memory for one process, SQLite for every process of one machine.

`open_store` is the only name that most code needs; nothing is imported before it is used.
"""

from __future__ import annotations

import os
from typing import Final

from lightspan.errors import ConfigError
from lightspan.store import Store

__all__ = ["open_store"]

_SUFFIXES: Final = (".db", ".sqlite")
_POWER_LOSS: Final = "power_loss=true"
_ALTERNATIVES: Final = (
    "use 'memory:' (this process only), 'sqlite:///absolute/path.db', 'sqlite:relative/path.db' "
    "or a path that ends in .db or .sqlite"
)


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store that a URL names, not opened yet: use it in `async with`, or call its `open`.

    `memory:` is a new store each time. `sqlite:…?power_loss=true` survives a power loss as well as
    `kill -9`, at the price of one disk flush per transaction.

    Raises:
        ConfigError: the URL names no store.
    """
    text = os.fspath(url)
    if text in ("memory:", "memory://"):
        from lightspan.stores.memory import MemoryStore

        return MemoryStore()
    path, power_loss = _sqlite_path(text)
    from lightspan.stores.sqlite import SQLiteStore

    return SQLiteStore(path, power_loss=power_loss)


def _sqlite_path(url: str) -> tuple[str, bool]:
    name, _, option = url.partition("?")
    if option not in ("", _POWER_LOSS):
        raise ConfigError(f"store {url!r}: no option {option!r}; the only one is {_POWER_LOSS!r}")
    path = name.removeprefix("sqlite:")
    if path == name and not (name.endswith(_SUFFIXES) and ":" not in name.partition("/")[0]):
        raise ConfigError(f"store {url!r} is not known: {_ALTERNATIVES}")
    if path.startswith("//") and not path.startswith("///"):
        raise ConfigError(f"store {url!r} names a host; a file has three slashes: {_ALTERNATIVES}")
    path = path.removeprefix("//")
    if not path or path.endswith("/"):
        raise ConfigError(f"store {url!r} names no file: {_ALTERNATIVES}")
    return path, bool(option)
