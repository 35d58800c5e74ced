"""The command `lightspan cancel`: cancel the open rollouts of a training."""

from __future__ import annotations

import argparse
from typing import Any

from lightspan.errors import ConfigError

DESCRIPTION = """\
Cancel the rollouts of a training that are queued or under way, so that no runner works for it. What
has ended stays. The training can still be resumed: it asks for the rollouts of its current step
again. `lightspan status STORE` lists the trainings.

A training that is live is stopped where it runs (Ctrl-C); with --force its open rollouts are
cancelled, and it goes on without them. With a served store (https://...) a trainer's key is needed,
in LIGHTSPAN_STORE_KEY.
"""


def add(commands: Any) -> None:
    """Add the subcommand `cancel`."""
    parser = commands.add_parser(
        "cancel",
        help="cancel the open rollouts of a training",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", metavar="STORE", help="URL or file of the store")
    parser.add_argument(
        "run_id",
        nargs="?",
        metavar="RUN",
        help="id of the training's run; its beginning or end is enough",
    )
    parser.add_argument("--gone", action="store_true", help="all trainings that are gone")
    parser.add_argument("--force", action="store_true", help="even if the training is live")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    from lightspan.progress import plural
    from lightspan.stores import open_existing
    from lightspan.stores.aio import run_sync
    from lightspan_cluster.store_status import cancel_gone, cancel_run

    if (options.run_id is None) is not options.gone:
        raise ConfigError("give either RUN or --gone; `lightspan status STORE` lists the trainings")

    async def cancel() -> dict[str, int]:
        async with open_existing(options.store) as store:
            if options.gone:
                return await cancel_gone(store)
            return dict([await cancel_run(store, options.run_id, force=options.force)])

    cancelled = run_sync(cancel())
    return (
        "\n".join(
            f"training {run_id}: cancelled {plural(count, 'rollout')}"
            for run_id, count in cancelled.items()
        )
        or "no training is gone"
    )
