"""What the stores that keep SQL tables share: everything but the tables' place and its ways.

`store` is such a store as callers see it. `database` is what an open one has: the moves bound to
its tables, and who writes and reads. `tables` asks what `queries.sql` says, in words that SQLite
and PostgreSQL both take; `statements` gives each its own. `rows` are what goes in and out, and
`jobs` commits together what arrives together.
"""
