"""The command `lightspan status`: show who uses a store."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = """\
Show the trainings of a store (live, complete or gone), the number of their rollouts by status, how
many attempts were lost and why, their gateways, and the runners that were started by hand with the
attempts that they run. A line says if a runner has another version of the app than its trainer or
another runner. Nothing in the store changes.

A training that is gone has stopped, was killed or has been silent for 20 s, as in a network cut. If
it has ended, it can be resumed (resume=True, or --resume); `lightspan cancel STORE RUN` removes its
open rollouts. A runner that ended normally is no longer shown. One that was killed, and a training
that is complete, are shown for a day after the last announcement. With a served store (https://...)
a trainer's key is needed, in LIGHTSPAN_STORE_KEY.
"""


def add(commands: Any) -> None:
    """Add the subcommand `status`."""
    parser = commands.add_parser(
        "status",
        help="show the trainings and runners that use a store",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", metavar="STORE", help="URL or file of the store")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="count calls and tokens by model too, which reads every span",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    import msgspec

    from lightspan.errors import StoreError
    from lightspan.stores import open_existing
    from lightspan.stores.aio import run_sync
    from lightspan_cluster.store_status import StoreStatus, read_status, status_lines

    async def read() -> StoreStatus:
        async with open_existing(options.store, read_only=True) as store:
            return await read_status(store, with_tokens=options.tokens)

    try:
        status = run_sync(read())
    except StoreError as error:
        if "key may not call" not in str(error):
            raise
        raise StoreError(f"`lightspan status` reads what this key may not read: {error}") from error
    if options.json:
        return msgspec.json.format(msgspec.json.encode(status)).decode()
    return "\n".join(status_lines(status))
