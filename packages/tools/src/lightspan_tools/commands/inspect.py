"""`lightspan inspect`: show a run, a rollout or a call."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightspan.errors import ConfigError
from lightspan_tools.commands._query import add_query, read_query
from lightspan_tools.pagination import SORTS, Page


def add(commands: Any) -> None:
    """Add the subcommand `inspect`."""
    parser = commands.add_parser(
        "inspect",
        help="show a run, a rollout or a call",
        description="Show a run, or a store of production. With a rollout or an attempt, show its "
        "span tree, the coverage of its calls and their advantages with reasons; with a call, also "
        "its tokens and text. The start or the end of an id is enough.",
    )
    parser.add_argument(
        "run_folder",
        metavar="RUN",
        help="a folder such as runs/sql, or the store of production, such as sqlite:app.db",
    )
    parser.add_argument(
        "rollout", nargs="?", metavar="ROLLOUT", help="a rollout; in a store, an attempt"
    )
    parser.add_argument("call", nargs="?", metavar="CALL", help="one of its model calls")
    listed = parser.add_argument_group("list of rollouts or attempts")
    listed.add_argument(
        "--sort",
        choices=SORTS,
        default="step",
        help="step: the last, in the order of steps (the default); reward: unscored, then the "
        "lowest first (in production the lowest, then the unrated); agent: by the agents that "
        "called a model",
    )
    listed.add_argument(
        "--limit", type=int, default=20, metavar="N", help="number of rows (20); 0 for all"
    )
    listed.add_argument(
        "--agent",
        metavar="PATTERN",
        help="only those in which such an agent called a model; a name or a glob on paths",
    )
    listed.add_argument(
        "--grep", metavar="TEXT", help="only those with this text in a recorded span, case as there"
    )
    listed.add_argument(
        "--all",
        action="store_true",
        help="count the calls of all rollouts, however many; of more than 5,000, only those of the "
        "list are counted otherwise",
    )
    listed.add_argument("--status", help="only this status: succeeded, failed, timeout, lost, ...")
    parser.add_argument(
        "--json", action="store_true", help="write JSON (lightspan_tools.inspect_report)"
    )
    parser.add_argument(
        "--images", type=Path, metavar="FOLDER", help="write the images of CALL to a folder"
    )
    add_query(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    from lightspan_tools.inspect import inspect_run, inspect_store

    query = read_query(options, options.run_folder)
    if options.images is not None and options.call is None:
        raise ConfigError("--images writes the images of one call: name a rollout and a call")
    page = Page(
        sort=options.sort,
        limit=options.limit,
        status=options.status,
        agent=options.agent,
        grep=options.grep,
        is_whole=options.all,
    )
    ids = options.rollout, options.call
    how: dict[str, Any] = {"page": page, "as_json": options.json, "images": options.images}
    if query is not None:
        return inspect_store(options.run_folder, *ids, query=query, **how)
    return inspect_run(Path(options.run_folder), *ids, **how)
