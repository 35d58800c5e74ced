"""`lightspan compress`: fine-tune a small model on the recorded calls of a large endpoint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from lightspan.errors import ConfigError, DataError
from lightspan.progress import PlainReporter
from lightspan.schema.validation import check_number, check_whole
from lightspan_tools.commands._query import add_query

DESCRIPTION = """\
Fine-tune a small model on the calls that production recorded of a large endpoint (lightspan.record
or LIGHTSPAN_STORE), and say what 1,000 calls cost before and after.

Each recorded call whose score is at least --min-reward is imitated: prompt, tools and answer. The
score is the last feedback or reward on the call, else on its attempt; without --min-reward, calls
without a score are imitated too. What is left out is counted by reason.

With --app and --tasks, the app then runs once per held-out task with its own endpoint, and once
with the small model. Tokens are those that the endpoint counted. The small model's seconds are
those of this machine in which a call was being answered.

Files: FOLDER is the model; FOLDER.compress.json is what --resume continues; FOLDER.measured has the
runs of the held-out tasks.
"""


def add(commands: Any) -> None:
    """Add the subcommand `compress`."""
    parser = commands.add_parser(
        "compress",
        help="fine-tune a small model on recorded calls of a large endpoint, and compare the cost",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", metavar="STORE", help="the store, such as sqlite:production.db")
    parser.add_argument(
        "--model", required=True, metavar="NAME_OR_FOLDER", help="the small model to fine-tune"
    )
    parser.add_argument(
        "--folder", required=True, type=Path, help="new folder for the fine-tuned model"
    )
    parser.add_argument(
        "--min-reward", type=float, metavar="NUMBER", help="minimum score of an imitated call"
    )
    parser.add_argument(
        "--agents",
        action="append",
        default=[],
        metavar="PATTERN",
        help="an agent whose calls are imitated; may be repeated (every agent)",
    )
    add_query(parser)
    tuning = parser.add_argument_group("of the fine-tuning")
    tuning.add_argument("--epochs", type=float, default=3.0, help="passes over the calls (3)")
    tuning.add_argument("--batch-size", type=int, default=8, help="calls per update (8)")
    tuning.add_argument(
        "--learning-rate", type=float, metavar="RATE", help="(chosen from the model's size)"
    )
    tuning.add_argument(
        "--lora",
        type=int,
        nargs="?",
        const=16,
        metavar="RANK",
        help="train adapters (of rank 16), which are merged at the end",
    )
    tuning.add_argument("--device", default="cpu", help='"cpu" or "cuda" (cpu)')
    tuning.add_argument("--seed", type=int, default=0, help="seed of the order of calls (0)")
    tuning.add_argument(
        "--resume", action="store_true", help="continue after Ctrl-C, or measure a finished model"
    )
    measuring = parser.add_argument_group("of the comparison")
    measuring.add_argument(
        "--app", metavar="MODULE:APP", help="the app, such as my_app:answer, which returns a reward"
    )
    measuring.add_argument(
        "--tasks", type=Path, metavar="TASKS.jsonl", help="held-out tasks, one JSON value per line"
    )
    measuring.add_argument("--runners", type=int, default=8, help="concurrent attempts (8)")
    measuring.add_argument(
        "--price",
        type=float,
        nargs=2,
        metavar=("INPUT", "OUTPUT"),
        help="the endpoint's prices of a million input and a million output tokens",
    )
    measuring.add_argument(
        "--price-per-hour", type=float, metavar="PRICE", help="price of an hour of this machine"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only count what would be imitated, and its cost"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the text")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    from lightspan.runners.app import load_app
    from lightspan_tools.compression.run import Compression, plan, run

    _check(options)
    app = None
    if options.app is not None:
        if os.getcwd() not in sys.path:  # as `python -m` does, to import the app
            sys.path.insert(0, os.getcwd())
        app = load_app(options.app)
    names: tuple[str, ...]
    names = ("store", "model", "folder", "min_reward", "service", "since", "until", "epochs")
    names += ("batch_size", "learning_rate", "lora", "device", "seed", "tasks", "runners")
    settings = Compression(
        **{name: getattr(options, name) for name in (*names, "price_per_hour")},
        agents=tuple(options.agents),
        app=app,
        prices=None if options.price is None else tuple(options.price),
    )
    reporter = PlainReporter(sys.stderr)
    if options.dry_run:
        report = plan(settings, reporter)
    else:
        report = run(settings, reporter, resume=options.resume)
    return report.json() if options.json else report.text()


def _check(options: argparse.Namespace) -> None:
    """Raise an error for invalid options before anything is read or written."""
    if (options.app is None) is not (options.tasks is None):
        raise ConfigError("--app and --tasks belong together: give both, or none of them")
    if options.tasks is not None and not options.tasks.is_file():
        raise DataError(f"there is no tasks file {options.tasks}: give one with a JSON per line")
    for price in options.price or ():
        check_number("--price", price, low=0)
    check_number("--price-per-hour", options.price_per_hour, low=0, optional=True)
    check_whole("--runners", options.runners, 1)
    check_whole("--lora", options.lora, 1, optional=True)
