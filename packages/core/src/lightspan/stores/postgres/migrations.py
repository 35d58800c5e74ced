"""The tables of a schema: made where there are none, and brought up to date where they are older.

`migrations/1.sql` makes them, and each file after that changes what the one before it left. Which
ones a schema has had, its table `lightspan_versions` says.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final

import psycopg
from psycopg import sql

from lightspan import __version__
from lightspan.errors import NotFoundError, StoreFormatError
from lightspan.stores._sql.statements import read_text, statements_of
from lightspan.stores.postgres.address import Address

VERSION: Final = 3
"""The one that this lightspan reads and writes."""
_PACKAGE: Final = "lightspan.stores.postgres"
_TURN: Final = 0x6C737061
"""'lspa': the first half of the advisory lock under which a schema is migrated."""

Connection = psycopg.Connection[Any]


@cache
def migration(version: int) -> list[str]:
    """The statements that lead to a version. Read once: an upgrade may replace the file."""
    return statements_of(read_text(_PACKAGE, f"migrations/{version}.sql"))


def migrate(db: Connection, address: Address, *, create: bool, version: int = VERSION) -> None:
    """Bring the schema to a version, in one transaction; whoever else wants to waits for it.

    Args:
        db: committing by itself, with the schema as its search path.
        address: of the store.
        create: make the tables where there are none.
        version: the one to reach.

    Raises:
        NotFoundError: there is no store, and none is to be made.
        StoreFormatError: the schema is another program's, or a newer one.
    """
    found = _version(db, address)
    if found == 0 and not create:
        raise NotFoundError(f"there is no store {address.url}: nothing was recorded there")
    if found < version:
        with db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (_TURN, address.schema))
            _apply(db, address, _version(db, address), version)
    elif found > version:
        raise StoreFormatError(
            f"store {address.url}: written by a newer lightspan (schema version {found}, this "
            f"one, {__version__} of {sys.executable}, knows {version}); upgrade lightspan there, "
            "or name another schema"
        )


def _apply(db: Connection, address: Address, found: int, version: int) -> None:
    """What is missing still, now that it is this one's turn."""
    if found == 0:
        schema = sql.Identifier(address.schema)
        if not _has_schema(db, address):
            db.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
        db.execute(
            "CREATE TABLE lightspan_versions (version BIGINT PRIMARY KEY, lightspan TEXT NOT NULL, "
            "made_at TIMESTAMPTZ NOT NULL DEFAULT now())"
        )
    for number in range(found + 1, version + 1):
        for statement in migration(number):
            db.execute(statement.encode())
        db.execute(
            "INSERT INTO lightspan_versions (version, lightspan) VALUES (%s, %s)",
            (number, __version__),
        )


def _version(db: Connection, address: Address) -> int:
    """The schema's; 0 if there is nothing in it."""
    query = "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s)::oid"
    names = {name for (name,) in db.execute(query, (_quoted(db, address),))}
    if "lightspan_versions" in names:
        found = db.execute("SELECT max(version) FROM lightspan_versions").fetchone()
        return int(found[0] or 0) if found else 0
    if names:
        raise StoreFormatError(
            f"store {address.url}: the schema {address.schema!r} belongs to another program "
            f"({len(names)} relations, such as {min(names)!r}); name another one with ?schema="
        )
    return 0


def _has_schema(db: Connection, address: Address) -> bool:
    found = db.execute("SELECT to_regnamespace(%s)", (_quoted(db, address),)).fetchone()
    return found is not None and found[0] is not None


def _quoted(db: Connection, address: Address) -> str:
    return sql.Identifier(address.schema).as_string(db)
