"""A store in one SQLite file, for every process of one machine. The embedded default.

`store` is the store as callers see it. `database` is what an open one has: a `writer`, which
commits together what arrives together, and a reader; `tables` holds what both ask of `queries.sql`.
`file` creates, recognises and opens the file by `schema.sql`, brings an older one up to date by
`migrations`, and says what SQLite's errors mean.
"""

from lightspan.stores.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
