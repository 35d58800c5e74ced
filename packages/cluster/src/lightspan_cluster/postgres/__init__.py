"""A store in a PostgreSQL database, for processes on many machines.

- `store`: the store.
- `dsn`: parses the store's URL and hides its password.
- `server`: connects to the database server, and explains its errors.
- `schema`: creates the tables.
- `database`: the connections of an open store. It has two `writer` threads (one for state changes
  of rollouts, one for spans and calls), a reader and a `listener`.
- `tables`: runs the queries.

All modules but `dsn` and `plugin` need psycopg.
"""
