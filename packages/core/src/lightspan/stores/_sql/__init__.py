"""The code that all SQL stores share: all but the connections and the database's SQL dialect.

`store` implements the store's methods. `connections` holds the writer and the reader of an open
store. `tables` runs the queries of `queries.sql`, which `queries` loads and translates. `rows`
converts records, and `group_commit` commits writes in groups.
"""
