"""A store in a PostgreSQL database, for processes of many machines.

`store` is the store, `dsn` parses its URL and hides the password. `server` connects and translates
PostgreSQL's errors, `schema` makes the tables, `database` is what an open store has: two `writer`
threads (one moves rollouts, one appends spans and calls), a reader and a `listener`; `tables` has
the queries. All but `dsn` need psycopg.
"""
