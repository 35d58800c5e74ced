"""`lightspan fork`: continue a recorded rollout from a call, or find the call that lost it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightspan.errors import ConfigError, LightspanError
from lightspan.progress import PlainReporter, print_line

if TYPE_CHECKING:
    from lightspan_tools.forking.report import ForkReport

DESCRIPTION = """\
Continue a recorded rollout of a run from one of its calls. The calls before it are answered as
recorded, and the model is sampled from there on, so you see what else could have happened, with
rewards and their interval.

Without CALL, find the call that lost the rollout: a bisection over its calls, which continues the
rollout a few times from each that it tests. The call after which no continuation succeeds any more
is the one that lost it.

The app runs again, with its tools. The run itself stays unchanged: continuations are kept in its
folder forks/, and lightspan inspect shows them. Ctrl-C keeps what has ended.

Exit status: 1 if an error ended the command or the search, or no continuation has a reward; 130
after Ctrl-C.
"""


def add(commands: Any) -> None:
    """Add the subcommand `fork`."""
    parser = commands.add_parser(
        "fork",
        help="continue a rollout from one of its calls, or find the call that lost it",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="a folder such as runs/sql")
    parser.add_argument(
        "rollout", metavar="ROLLOUT", help="a rollout; the start or the end of its id is enough"
    )
    parser.add_argument(
        "call",
        nargs="?",
        metavar="CALL",
        help="the call to sample anew: its number from 1 on, or its id; none to find the call that "
        "lost the rollout",
    )
    parser.add_argument(
        "-n", "--count", type=int, default=8, metavar="N", help="continuations per call (8)"
    )
    parser.add_argument(
        "--success",
        type=float,
        metavar="REWARD",
        help="reward from which on a rollout is a success (the best of the rollouts of its group, "
        "or of its task)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="do not test a call a second time before it counts as lost, which is cheaper and less "
        "sure",
    )
    parser.add_argument(
        "--model",
        metavar="NAME_OR_FOLDER",
        help="a model that answers (the weights that the rollout used, or the nearest that the run "
        "keeps)",
    )
    parser.add_argument("--app", metavar="MODULE:APP", help="the app (that of the run)")
    parser.add_argument(
        "--reward",
        metavar="MODULE:NAME",
        help="what scores the continuations (what scored the run)",
    )
    parser.add_argument("--runners", type=int, default=8, help="continuations at once (8)")
    parser.add_argument(
        "--python", metavar="PATH", help="interpreter of the app's environment (this one)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda" (cpu)')
    parser.add_argument("--json", action="store_true", help="write JSON in place of the text")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the share of successes of each tested call, with its interval",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    if options.plot is not None and options.call is not None:
        raise ConfigError("--plot draws a search, which has no CALL: leave one of them out")
    if options.plot is not None:
        from lightspan_tools.plots import check_picture_path

        check_picture_path(options.plot, "--plot")
    report = _report(options)
    if options.plot is not None:
        from lightspan_tools.plots import loss_plot

        loss_plot(report, options.plot)
    text = report.json() if options.json else report.text()
    if report.is_stopped:
        print_line(text)
        raise KeyboardInterrupt
    if not report.is_scored:
        print_line(text)
        raise LightspanError("no continuation has a reward: see above")
    if report.loss is not None and report.loss.reason:
        print_line(text)
        raise LightspanError(f"the search could not go on: {report.loss.reason}")
    return text


def _report(options: argparse.Namespace) -> ForkReport:
    from lightspan_tools.forking.run import ForkCommand, run_fork

    if os.getcwd() not in sys.path:  # as `python -m` does, to import the app
        sys.path.insert(0, os.getcwd())
    names = ("count", "success", "model", "app", "reward", "runners", "python", "seed", "device")
    settings = {name: getattr(options, name) for name in names}
    return run_fork(
        ForkCommand(
            options.run_folder,
            options.rollout,
            options.call,
            confirm=not options.once,
            reporter=PlainReporter(sys.stderr),
            **settings,
        )
    )
