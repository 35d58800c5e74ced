"""Create the tables of a store in its PostgreSQL schema, and check their version.

The table `lightspan_versions` has the version.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final

import psycopg
from psycopg import sql

from lightspan import __version__
from lightspan.errors import NotFoundError, StoreFormatError
from lightspan.stores._sql.queries import read_text, statements_of
from lightspan_cluster.postgres.dsn import Address

VERSION: Final = 5
"""Version of the tables that this lightspan reads and writes."""
_WITHOUT_IMAGES: Final = 4
"""The version before there were images."""
_LOCK: Final = 0x6C737061
"""'lspa': first half of the key of the advisory lock under which a schema's tables are created."""

Connection = psycopg.Connection[Any]


@cache
def statements() -> list[str]:
    """Return the SQL statements that create the tables.

    They are cached, because an upgrade of lightspan may replace the file while the process runs.
    """
    return statements_of(read_text("lightspan_cluster.postgres", "schema.sql"))


def prepare(db: Connection, address: Address, *, create: bool, upgrade: bool) -> None:
    """Check the version of the tables; create those that are missing in one transaction.

    Args:
        db: a connection in autocommit mode with the schema as its search path.
        address: the store's address.
        create: whether to create the tables if there are none.
        upgrade: whether to add the tables of images to a schema of an older lightspan.

    Raises:
        NotFoundError: there are no tables, and `create` is False.
        StoreFormatError: the schema belongs to another program, or its tables have another version.
    """
    version = _version(db, address)
    if version == 0 and not create:
        raise NotFoundError(f"there is no store {address.url}: nothing was recorded there")
    if version == 0 or (upgrade and version == _WITHOUT_IMAGES):
        with db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (_LOCK, address.schema))
            version = _create(db, address, _version(db, address))
    if version != VERSION:
        age, hint = (
            ("a newer", "upgrade lightspan there")
            if version > VERSION
            else ("an older", "read it, or finish its run, with that lightspan")
        )
        raise StoreFormatError(
            f"store {address.url}: written by {age} lightspan (schema version {version}, this one, "
            f"{__version__} of {sys.executable}, reads {VERSION}); {hint}, or name another schema"
        )


def _create(db: Connection, address: Address, version: int) -> int:
    """Create the tables that version `version` lacks; return the version of the tables then."""
    if version not in (0, _WITHOUT_IMAGES):
        return version  # another process has created them
    [row] = db.execute("SELECT to_regnamespace(%s)", (_quoted(db, address),))
    if row[0] is None:
        db.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(address.schema)))
    for statement in statements():
        if version == 0 or "images" in statement:
            db.execute(statement.encode())
    query = "INSERT INTO lightspan_versions (version, lightspan) VALUES (%s, %s)"
    db.execute(query, (VERSION, __version__))
    return VERSION


def _version(db: Connection, address: Address) -> int:
    """Return the version of the schema's tables; 0 if there are no tables.

    Raises:
        StoreFormatError: the schema has tables of another program.
    """
    query = "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s)::oid"
    names = {name for (name,) in db.execute(query, (_quoted(db, address),))}
    if "lightspan_versions" in names:
        row = db.execute("SELECT max(version) FROM lightspan_versions").fetchone()
        return int(row[0] or 0) if row else 0
    if names:
        raise StoreFormatError(
            f"store {address.url}: the schema {address.schema!r} belongs to another program "
            f"({len(names)} relations, such as {min(names)!r}); name another one with ?schema="
        )
    return 0


def _quoted(db: Connection, address: Address) -> str:
    return sql.Identifier(address.schema).as_string(db)
