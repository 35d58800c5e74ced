"""`lightspan prune`: delete rollouts that ended long ago from a store."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lightspan.errors import ConfigError


def add(commands: Any) -> None:
    """Add the subcommand `prune`."""
    parser = commands.add_parser(
        "prune",
        help="delete rollouts that ended long ago from a store",
        description="Delete rollouts that ended before a time, with their attempts, spans, tokens "
        "and rewards, in batches, so that the store stays usable meanwhile; Ctrl-C keeps the rest. "
        "A training or an export that still needs them fails: prune what is older than your "
        "longest run.",
    )
    parser.add_argument("store", metavar="STORE", help="URL or file of the store")
    parser.add_argument(
        "--older-than",
        required=True,
        metavar="AGE",
        help="minimum age of the rollouts, such as 30d or 12h",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str | None:
    from lightspan.algorithms.recorded_attempts import seconds_ago
    from lightspan.progress import default_reporter
    from lightspan.stores import open_existing, public_url
    from lightspan.stores.aio import run_sync

    age_s = seconds_ago(options.older_than)
    if age_s is None:
        raise ConfigError(f"--older-than {options.older_than!r}: give an age such as 30d or 12h")
    store, url = open_existing(options.store), public_url(options.store)
    what = f"rollouts that ended more than {options.older_than} ago"
    if not options.yes and not _confirm(f"Delete all {what} from {url}, for good?"):
        return "nothing was deleted"
    deleted, remaining = run_sync(_prune(store, age_s, default_reporter()))
    return f"{url}: deleted {deleted:,} {what}, with their records; {remaining:,} remain"


def _confirm(question: str) -> bool:
    """Ask the user `question`; return whether the answer is yes.

    Raises:
        ConfigError: the standard input is no terminal, so the user cannot answer.
    """
    if not sys.stdin.isatty():
        raise ConfigError("deleted rollouts cannot be restored: add --yes to confirm")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


async def _prune(store: Any, age_s: float, reporter: Any) -> tuple[int, int]:
    """Delete rollouts that ended more than `age_s` seconds ago, and show the progress.

    Returns:
        The number of deleted rollouts and the number of remaining rollouts.
    """
    from lightspan.stores.protocol import PRUNED_AT_ONCE

    async with store:
        total, deleted = sum((await store.count()).values()), 0
        reporter.start("deleting", total)
        while True:
            batch = await store.prune(age_s, PRUNED_AT_ONCE)
            deleted += batch
            reporter.advance(batch)
            if batch < PRUNED_AT_ONCE:
                break
        reporter.finish()
        return deleted, sum((await store.count()).values())
