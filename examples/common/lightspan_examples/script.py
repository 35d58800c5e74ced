"""The `main` function of every example's `train.py`: train, resume, or make a dry run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightspan.errors import LightspanError
from lightspan.progress import PlainReporter, Reporter, default_reporter
from lightspan_examples.example import Example, Run
from lightspan_examples.options import check_options
from lightspan_tools.dry_run.report_model import STDOUT


def main(example: Example, description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Train, or with `--dev` make a dry run; return the exit status.

    Args:
        description: text above the options in `--help`; None for no text.
        arguments: command-line arguments; None for `sys.argv[1:]`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = example.parser(description or "")
    options = parser.parse_args(given)
    check_options(parser, options)
    reporter = default_reporter()
    try:
        if options.dev:
            return _dry_run(example, options, reporter)
        example.train(Run(example, options, reporter))
    except LightspanError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if not options.dev:
            print(f"go on with: {_resume_command(given)}", file=sys.stderr)
        return 130
    return 0


def _dry_run(example: Example, options: argparse.Namespace, reporter: Reporter) -> int:
    """Run a few tasks, print what training would do, and return the exit status."""
    if options.json == STDOUT:  # which the JSON has alone
        reporter = PlainReporter(sys.stderr)
    run = Run(example, options, reporter)
    trainer, train_tasks, held_out = example.prepare(run)
    report = trainer.dev(
        run.training.answer,
        train_tasks,
        held_out,
        selection=run.selection,
        agents=run.training.AGENTS,
        folder=options.folder,
    )
    print(report.write(options.json))
    if report.failure:
        print(f"train.py: {report.failure}", file=sys.stderr)
    return int(bool(report.failure))


def _resume_command(arguments: Sequence[str]) -> str:
    kept = [part for part in arguments if part != "--resume"]
    return " ".join(["python", sys.argv[0], *kept, "--resume"])
