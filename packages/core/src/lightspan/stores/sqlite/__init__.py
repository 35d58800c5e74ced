"""A store in one SQLite file, for every process of one machine. The embedded default.

`store` is the store as callers see it. `database` is what an open one has: it commits together
what arrives together, and reads; `tables` holds what it asks of `queries.sql`. `file` creates,
recognises and opens the file by `schema.sql`, and says what SQLite's errors mean.
"""

from lightspan.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
