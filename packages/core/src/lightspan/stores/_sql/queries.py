"""Load SQL queries by name: the queries that all SQL stores share, and the queries of one store.

In `queries.sql` of this package, `?` and `:name` stand for one value, `IN (?...)` takes a list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Final

_LIST: Final = "IN (?...)"
_PACKAGE: Final = "lightspan.stores._sql"
# Import the readers of `importlib.resources` now. Otherwise the first thread that loads a query
# imports them, and a child process forked meanwhile has a half-imported module for good.
resources.files(_PACKAGE)


@cache
def named_queries(package: str, translate: Callable[[str], str]) -> dict[str, str]:
    """Return the queries by name: the shared ones, translated, and those in the file of `package`.

    A query of the package replaces a shared query of the same name. The files are read once,
    because an upgrade may replace them.

    Args:
        translate: converts a shared query to the database's SQL dialect.
    """
    shared = {name: translate(query) for name, query in _load_queries(_PACKAGE).items()}
    return shared | _load_queries(package)


@cache
def queries_of_one(package: str, translate: Callable[[str], str]) -> dict[str, str]:
    """Return the shared queries with a list of values, changed to take one value instead.

    The result maps names to queries. A comparison with one value costs less than with a list of one
    value. Queries that `package` replaces are left out.

    Args:
        package: package of the store's own queries.
        translate: converts a shared query to the database's SQL dialect.
    """
    own = _load_queries(package)
    return {
        name: translate(query.replace(_LIST, "= ?"))
        for name, query in _load_queries(_PACKAGE).items()
        if _LIST in query and name not in own
    }


def statements_of(text: str) -> list[str]:
    """Split a file of SQL at semicolons into statements, without the lines that begin with `--`.

    A statement must not contain a semicolon.
    """
    code = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    return [statement.strip() for statement in code.split(";") if statement.strip()]


def read_text(package: str, name: str) -> str:
    """Return the text of a file in a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _load_queries(package: str) -> dict[str, str]:
    _, *parts = read_text(package, "queries.sql").split("-- name: ")
    return {name.strip(): query.strip() for name, query in (part.split("\n", 1) for part in parts)}
