"""The SQL that lies in files: the queries that all stores share, in the words of each, and its own.

In `queries.sql` beside this, `?` and `:name` stand for values and `IN (?...)` for one of a list.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Final

ANY_OF: Final = "IN (?...)"
_HERE: Final = "lightspan.stores._sql"
# Imports what reads files. Else a thread that is the first to ask for a query does, and a child
# that is forked meanwhile has half a module for ever.
resources.files(_HERE)


def named_queries(package: str, translate: Callable[[str], str]) -> dict[str, str]:
    """The shared queries by name, translated, and those of a package's own file, as they are.

    A query of its own takes the place of a shared one of the same name.
    """
    shared = {name: translate(query) for name, query in _named(_HERE).items()}
    return shared | _named(package)


def queries_of_one(package: str, translate: Callable[[str], str]) -> dict[str, str]:
    """The shared queries that take nothing but a list, for a list of one: without its cost."""
    return {
        name: translate(query.replace(ANY_OF, "= ?"))
        for name, query in _named(_HERE).items()
        if ANY_OF in query and name not in _named(package)
    }


def statements_of(text: str) -> list[str]:
    """The statements of a file: split at semicolons, so nothing in it may contain one."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    return [statement.strip() for statement in code.split(";") if statement.strip()]


def read_text(package: str, name: str) -> str:
    """A file that lies in a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _named(package: str) -> dict[str, str]:
    _, *parts = read_text(package, "queries.sql").split("-- name: ")
    named = (part.split("\n", 1) for part in parts)
    return {name.strip(): query.strip() for name, query in named}
