"""A store in one SQLite file, for every process of one machine: the default.

`store` is the store, `database` holds its connections, `tables` runs its queries. `file` creates,
checks and opens the file by `schema.sql`, and translates SQLite's errors.
"""

from lightspan.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
