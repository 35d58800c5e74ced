"""The options that choose among what production recorded, for the commands that read a store."""

from __future__ import annotations

import argparse
from typing import Any

from lightspan.algorithms.recorded_attempts import Query
from lightspan.errors import ConfigError
from lightspan.stores import names_store

_OPTIONS = ("service", "since", "until")


def add_query(parser: Any) -> None:
    """Add the options."""
    group = parser.add_argument_group("of a store of production")
    group.add_argument("--service", metavar="NAME", help="only attempts of this service")
    group.add_argument(
        "--since", metavar="TIME", help="2026-11-20T09:00, or how long ago, such as 2h or 7d"
    )
    group.add_argument("--until", metavar="TIME", help="likewise; attempts that began before")


def read_query(options: argparse.Namespace, source: str) -> Query | None:
    """The attempts that were asked for; None if the source is a run's folder.

    Raises:
        ConfigError: a time cannot be read, or an option was given and the source is a run.
    """
    if names_store(source):
        return Query.of(options.service, options.since, options.until)
    for name in _OPTIONS:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} applies only to a store of production; {source} is a run")
    return None
