"""`lightspan ui`: show runs and stores in a browser."""

from __future__ import annotations

import argparse
from typing import Any

DEFAULT = "runs"
"""Folder that is shown if none is named."""


def add(commands: Any) -> None:
    """Add the subcommand `ui`."""
    parser = commands.add_parser(
        "ui",
        help="show runs, rollouts, prompts and production in a browser",
        description="Serve a page on this machine that shows runs while they train, the rollouts "
        "and model calls of runs and of production, why each call got its advantage or was not "
        "trained, and what a search for prompts tried. It only reads, unless --write lets it rate "
        "rollouts.",
    )
    parser.add_argument(
        "places",
        nargs="*",
        metavar="PLACE",
        help="a folder of runs (runs), a run such as runs/sql, or a store such as sqlite:app.db, "
        "postgresql://… or https://…; several at once",
    )
    parser.add_argument("--write", action="store_true", help="let the page rate rollouts")
    parser.add_argument("--host", default="127.0.0.1", help="interface (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8765, help="port; 0 for a free one (8765)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--key-env",
        metavar="NAME",
        help="the variable with the key in place of a random one; required for other hosts",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from lightspan_ui.main import UiOptions, serve

    places = options.places or [DEFAULT]
    serve(
        UiOptions(
            places=tuple(places),
            host=options.host,
            port=options.port,
            write=options.write,
            opens=options.open,
            key_variable=options.key_env,
            parent=getattr(options, "parent", None),
        )
    )
