"""`lightspan runner`: run an app for trainings of another environment."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from lightspan.progress import print_line

DESCRIPTION = """\
Run an app's attempts in this environment, for a training in another one. The two meet in the store
that the trainer names (`waiting for runners: …`): a file of this machine, a database or a server.
Started before the training, or before the server, the runner waits for it; it joins every training
of that store which asks for the app, and no other.

It ends when a training that it joined is complete. When one is stopped or killed it waits, for it
can be resumed. Ctrl-C lets attempts under way end; a second Ctrl-C, or SIGTERM, gives them back to
the training, and so does the end of their lease if the runner is killed. No attempt is lost.

On a served store (--store https://...) the key in LIGHTSPAN_STORE_KEY is taken out of the
environment before the app is loaded. But the app shares its process with the runner, which holds
the key, and so it does with --isolation process: it could report for itself. Only apps that are a
Command, a program of their own, are kept from that.

Exit status: 0 ended as meant; 1 the app is not in this environment, the two sides' versions of
lightspan do not fit, or the store cannot be used; 2 wrong arguments.
"""


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "runner",
        help="run an app in its own environment, for a training in another",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("app", metavar="MODULE:APP", help="such as my_app:answer")
    parser.add_argument("--store", required=True, metavar="URL", help="as the trainer names it")
    parser.add_argument("--run", dest="run_id", metavar="ID", help="work for this run only")
    parser.add_argument("--slots", type=int, default=8, metavar="N", help="attempts at once (8)")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="that share the attempts (1)"
    )
    parser.add_argument(
        "--isolation",
        choices=["thread", "process"],
        default="thread",
        help="a process for each attempt at work, or shared ones (thread)",
    )
    parser.add_argument(
        "--app-dir",
        action="append",
        metavar="DIR",
        help="a folder of the app's modules; may be repeated (the working folder)",
    )
    parser.add_argument(
        "--lease",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="of silence after which attempts are given to others (30)",
    )
    parser.add_argument(
        "--until-idle", type=float, metavar="SECONDS", help="end after so long without an attempt"
    )
    parser.add_argument(
        "--stay", action="store_true", help="wait for the next training when one is complete"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from lightspan.runners.standalone import JoinOptions, join
    from lightspan.stores import take_credentials

    take_credentials(options.store)  # before the app is loaded, which must not find it
    asyncio.run(
        join(
            JoinOptions(
                store_url=options.store,
                app=options.app,
                run_id=options.run_id,
                slots=options.slots,
                processes=options.processes,
                isolation=options.isolation,
                app_dirs=_folders(options.app_dir),
                lease_s=options.lease,
                until_idle_s=options.until_idle,
                stay=options.stay,
            ),
            print_line,
        )
    )


def _folders(given: list[str] | None) -> tuple[str, ...]:
    from lightspan.runners.foreign_python import check_folders

    return tuple([os.getcwd()] if given is None else check_folders("--app-dir", given))
