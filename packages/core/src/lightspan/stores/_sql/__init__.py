"""The parts that SQL stores share: everything but connections and the database's SQL dialect.

`store` implements the store's methods, `connections` holds a writer and a reader with the state
machine bound to their tables. `tables` runs the queries of `queries.sql`, which `queries` loads
and translates, `rows` converts records, `group_commit` commits writes in groups.
"""
