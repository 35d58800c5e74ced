"""`lightspan prune`: have a store forget what ended long ago."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lightspan.errors import ConfigError


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "prune",
        help="have a store forget rollouts that ended long ago",
        description="Forget rollouts that ended before a time, with their attempts, spans, tokens "
        "and rewards, in portions, so that whoever uses the store goes on meanwhile; Ctrl-C leaves "
        "the rest as it is. What a training still needs to go on, or an export to be made, is gone "
        "then: prune what is older than your longest run.",
    )
    parser.add_argument("store", metavar="STORE", help="its URL or file")
    parser.add_argument(
        "--older-than", required=True, metavar="AGE", help="how long ago they ended: 30d, 12h"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str | None:
    from lightspan.algorithms.recorded_attempts import seconds_ago
    from lightspan.progress import default_reporter
    from lightspan.stores import open_existing, public_url
    from lightspan.stores.aio import run_sync

    age_s = seconds_ago(options.older_than)
    if age_s is None:
        raise ConfigError(f"--older-than {options.older_than!r}: give an age such as 30d or 12h")
    store, place = open_existing(options.store), public_url(options.store)
    what = f"rollouts that ended more than {options.older_than} ago"
    if not options.yes and not _is_meant(f"Forget all {what} in {place}, for good?"):
        return "nothing was forgotten"
    pruned, left = run_sync(_prune(store, age_s, default_reporter()))
    return f"{place}: forgot {pruned:,} {what}, with all that was recorded of them; {left:,} left"


def _is_meant(question: str) -> bool:
    """Raises `ConfigError` where nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError("what is forgotten is gone for good: add --yes to say that it is meant")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


async def _prune(store: Any, age_s: float, reporter: Any) -> tuple[int, int]:
    """(How many rollouts were forgotten, how many are left.)"""
    from lightspan.stores.protocol import PRUNED_AT_ONCE

    async with store:
        total, pruned = sum((await store.count()).values()), 0
        reporter.start("forgetting", total)
        while True:
            some = await store.prune(age_s, PRUNED_AT_ONCE)
            pruned += some
            reporter.advance(some)
            if some < PRUNED_AT_ONCE:
                break
        reporter.finish()
        return pruned, sum((await store.count()).values())
