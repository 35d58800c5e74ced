"""A store in a PostgreSQL database, for processes on many machines.

`store` is the store, `dsn` parses its URL and hides the password. `server` connects and translates
PostgreSQL's errors, `schema` creates the tables. `database` has the connections of an open store:
two `writer` threads (one for state changes of rollouts, one for spans and calls), a reader and a
`listener`; `tables` runs the queries. All modules but `dsn` and `plugin` need psycopg.
"""
