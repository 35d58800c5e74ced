"""The command `lightspan runner`: run an app's attempts for trainings in other environments."""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from lightspan.progress import print_line

if TYPE_CHECKING:
    from lightspan_cluster.join_token import JoinToken

_EXIT_TIMEOUT_S: Final = 2.0
"""Seconds in which the process may end after its runner has ended. A thread that waits for a
store's server would keep it alive."""
DESCRIPTION = """\
Run an app's attempts in this environment, for a training in another one. Both use the store that
the trainer prints (`waiting for runners: …`): a file of this machine, a database or a server. If
the training or the server has not started, the runner waits for it. It joins the trainings of that
store that run the app, and no others.

A trainer with runners=Hosts() serves its own store, and prints the line to run on other machines:
`lightspan runner --join HOST:PORT/TOKEN …`. TOKEN is removed from the command line before the app
is loaded.

The runner ends when a training that it joined is complete. If the training is stopped or killed,
the runner waits, as it can be resumed. Ctrl-C lets running attempts end; a second Ctrl-C, or
SIGTERM, returns them to the training. If the runner is killed, they return when their lease
expires. No attempt is lost.

With a served store (--store https://...) the key in LIGHTSPAN_STORE_KEY is removed from the
environment before the app is loaded. But with it, and with --join, the app shares a process with
the runner, which holds the key, even with --isolation process, so it could use the key. Only apps
that are a Command, a separate program, cannot.

Exit status: 0 ended normally; 1 the app is not in this environment, the versions of lightspan are
incompatible, or the store cannot be used; 2 wrong arguments.
"""


def add(commands: Any) -> None:
    """Add the subcommand `runner`."""
    parser = commands.add_parser(
        "runner",
        help="run an app in its own environment, for a training in another",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("app", metavar="MODULE:APP", help="such as my_app:answer")
    store = parser.add_mutually_exclusive_group(required=True)
    store.add_argument("--store", metavar="URL", help="URL of the store, as the trainer prints it")
    store.add_argument(
        "--join", metavar="HOST:PORT/TOKEN", help="a trainer on another machine, as it prints it"
    )
    parser.add_argument("--run", dest="run_id", metavar="ID", help="work for this run only")
    parser.add_argument("--slots", type=int, default=8, metavar="N", help="concurrent attempts (8)")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the attempts (1)",
    )
    parser.add_argument(
        "--isolation",
        choices=["thread", "process"],
        default="thread",
        help="a process per running attempt, or shared processes (thread)",
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
        help="lease of an attempt, which is requeued without a heartbeat for so long (30)",
    )
    parser.add_argument(
        "--until-idle", type=float, metavar="SECONDS", help="end after this time without an attempt"
    )
    parser.add_argument(
        "--stay", action="store_true", help="wait for the next training when one is complete"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from lightspan.stores import take_credentials
    from lightspan_cluster.join_token import take_token

    # before the app, which must not see them, is loaded
    if options.join is not None:
        asyncio.run(_join_by_token(take_token(options.join), options))
    else:
        take_credentials(options.store)
        asyncio.run(_join(options.store, options))


async def _join_by_token(token: JoinToken, options: argparse.Namespace) -> None:
    from lightspan_cluster.tunnel import Tunnel

    async with Tunnel(token) as tunnel:
        await _join(tunnel.keep(), options)


async def _join(store_url: str, options: argparse.Namespace) -> None:
    from lightspan_cluster.standalone import JoinOptions, join

    joined = JoinOptions(
        store_url=store_url,
        app=options.app,
        run_id=options.run_id,
        slots=options.slots,
        processes=options.processes,
        isolation=options.isolation,
        app_dirs=_folders(options.app_dir),
        lease_s=options.lease,
        until_idle_s=options.until_idle,
        stay=options.stay,
    )
    await join(joined, print_line)
    timer = threading.Timer(_EXIT_TIMEOUT_S, os._exit, [0])
    timer.daemon = True
    timer.start()


def _folders(folders: list[str] | None) -> tuple[str, ...]:
    from lightspan.runners.foreign_python import check_folders

    return tuple([os.getcwd()] if folders is None else check_folders("--app-dir", folders))
