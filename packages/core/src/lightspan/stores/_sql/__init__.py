"""What the SQL stores share: all but connections and dialect.

`store` is the store, `connections` its writer and readers with the state machine bound to its
tables. `tables` runs the queries of `queries.sql`, which `queries` loads for a dialect, `rows`
converts records, `group_commit` commits together what arrives together.
"""
