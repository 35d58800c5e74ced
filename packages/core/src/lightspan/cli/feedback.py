"""`lightspan feedback`: say how good an attempt or a call of production was."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "feedback",
        help="reward an attempt or a call after the fact",
        description="Put a reward on an attempt or a call that was recorded, hours later if need "
        "be. Of several on one of them the last counts.",
    )
    parser.add_argument("id", metavar="ID", help="of an attempt, a call, or an OpenAI response")
    parser.add_argument("reward", type=float, metavar="REWARD", help="more is better")
    parser.add_argument("--store", metavar="URL", help="LIGHTSPAN_STORE if absent")
    parser.add_argument("--comment", metavar="TEXT", help="for people")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    from lightspan.production.feedback import feedback

    put = feedback(options.id, options.reward, store=options.store, comment=options.comment)
    what = f"attempt {put.attempt_id}"
    if put.call_id is not None:
        what = f"call {put.call_id} of {what}"
    return f"{options.reward:g} on {what}"
