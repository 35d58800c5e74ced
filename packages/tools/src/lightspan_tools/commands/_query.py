"""Options that select attempts in a store of production recordings."""

from __future__ import annotations

import argparse
from typing import Any

from lightspan.algorithms.recorded_attempts import Query
from lightspan.errors import ConfigError
from lightspan.stores import names_store


def add_query(parser: Any) -> None:
    """Add the options `--service`, `--since` and `--until` to a parser."""
    group = parser.add_argument_group("of a store of production")
    group.add_argument("--service", metavar="NAME", help="only attempts of this service")
    group.add_argument(
        "--since", metavar="TIME", help="only attempts since 2026-11-20T09:00, or an age: 2h, 7d"
    )
    group.add_argument("--until", metavar="TIME", help="only attempts that began before")


def read_query(options: argparse.Namespace, source: str) -> Query | None:
    """Return which attempts the user's options select, if `source` is the URL of a store.

    Return None if `source` is the folder of a run, from which no attempts are selected.

    Raises:
        ConfigError: a time cannot be parsed, or `source` is a run's folder and an option is set.
    """
    if names_store(source):
        return Query.of(options.service, options.since, options.until)
    for name in ("service", "since", "until"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} applies only to a store of production; {source} is a run")
    return None
