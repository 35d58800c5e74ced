"""`lightspan feedback`: reward an attempt or a call that was recorded in production."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Add the subcommand `feedback` to argparse's subparsers `commands`."""
    parser = commands.add_parser(
        "feedback",
        help="reward an attempt or a call after the fact",
        description="Add a reward to a recorded attempt or call, even hours later. The last reward "
        "counts.",
    )
    parser.add_argument("id", metavar="ID", help="attempt (start or end of its id), call, response")
    parser.add_argument("reward", type=float, metavar="REWARD", help="a number; higher is better")
    parser.add_argument("--store", metavar="URL", help="URL of the store (LIGHTSPAN_STORE)")
    parser.add_argument("--comment", metavar="TEXT", help="comment for readers")
    parser.add_argument("--correction", metavar="TEXT", help="a better answer, to learn from")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    from lightspan.production.feedback import feedback

    texts = {"comment": options.comment, "correction": options.correction}
    reward = feedback(options.id, options.reward, store=options.store, **texts)
    target = f"attempt {reward.attempt_id}"
    if reward.call_id is not None:
        target = f"call {reward.call_id} of {target}"
    return f"{options.reward:g} on {target}"
