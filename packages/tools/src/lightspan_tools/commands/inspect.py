"""`lightspan inspect`: look at a run, a rollout or a call."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightspan_tools.commands._query import add_query, read_query
from lightspan_tools.pagination import SORTS, Page


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "inspect",
        help="show a run, a rollout or a call",
        description="Show a run, or what production recorded; with a rollout or an attempt, its "
        "span tree, the coverage of its calls and why each was trained with which advantage; with "
        "a call, its tokens and text too. The start or the end of an id is enough.",
    )
    parser.add_argument(
        "run_folder",
        metavar="RUN",
        help="a folder such as runs/sql, or the store of production, such as sqlite:app.db",
    )
    parser.add_argument("rollout", nargs="?", metavar="ROLLOUT", help="of production: an attempt")
    parser.add_argument("call", nargs="?", metavar="CALL", help="one of its model calls")
    listed = parser.add_argument_group("of the list of rollouts or attempts")
    listed.add_argument(
        "--sort",
        choices=SORTS,
        default="step",
        help="step: as they were run, the last ones (the default); reward: the lowest first, and "
        "before them those that have none; agent: by the agents that called a model",
    )
    listed.add_argument(
        "--limit", type=int, default=20, metavar="N", help="so many (20); 0 for all"
    )
    listed.add_argument("--status", help="only those: succeeded, failed, timeout, lost, ...")
    add_query(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    from lightspan_tools.inspect import inspect_run, inspect_store

    query = read_query(options, options.run_folder)
    page = Page(sort=options.sort, limit=options.limit, status=options.status)
    chosen = options.rollout, options.call
    if query is not None:
        return inspect_store(options.run_folder, *chosen, query=query, page=page)
    return inspect_run(Path(options.run_folder), *chosen, page=page)
