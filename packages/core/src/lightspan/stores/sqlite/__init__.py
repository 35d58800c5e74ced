"""A store in one SQLite file, for every process of one machine: the default.

`store` is the store, `database` its connections, `tables` runs the queries, `file` creates, checks
and opens the file by `schema.sql` and translates SQLite's errors.
"""

from lightspan.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
