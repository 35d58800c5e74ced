"""A store in a PostgreSQL database, for processes of many machines. What SQLite is outgrown for.

`store` is the store as callers see it, `address` its URL and what is secret of that. `server`
connects, refuses a server that forgets, and says what PostgreSQL's errors mean; `schema` makes the
tables. `database` is what an open store has: two lanes of `writer`, one in which rollouts move and
one to which spans and calls are added, a reader, and a `listener`; `tables` says how PostgreSQL is
asked. All but `address` need psycopg.
"""
