"""`lightspan rescore`: score a run's rollouts again by another reward function."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from lightspan.errors import ConfigError
from lightspan.schema.records import Mode


def add(commands: Any) -> None:
    """Add the subcommand `rescore`."""
    parser = commands.add_parser(
        "rescore",
        help="score a run's rollouts under another reward, and show what it would change",
        description="Score a run's recorded rollouts again, by a function or a lightspan.Judge, "
        "and show the changes: means, signs of advantages within groups, the most changed "
        "rollouts. The run itself stays unchanged.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="a folder such as runs/sql")
    parser.add_argument(
        "--reward",
        required=True,
        metavar="MODULE:NAME",
        help="a function of task, answer, episode or episodes, or a lightspan.Judge",
    )
    parser.add_argument(
        "--mode",
        choices=[str(Mode.TRAIN), str(Mode.VAL), str(Mode.DEV)],
        help="only rollouts of this mode (training and evaluation)",
    )
    parser.add_argument(
        "--limit", type=int, default=10, metavar="N", help="changed rollouts shown (10); 0 for all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the text")
    parser.add_argument(
        "--write", metavar="NAME", help="store the new reward in the run under this name"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> str:
    import json

    from lightspan_tools.rescore import rescore

    if options.limit < 0:
        raise ConfigError(f"--limit {options.limit} must be at least 0")
    if os.getcwd() not in sys.path:  # as `python -m` does, to import the reward
        sys.path.insert(0, os.getcwd())
    result = rescore(
        options.run_folder,
        options.reward,
        mode=None if options.mode is None else Mode(options.mode),
        write=options.write,
    )
    if options.json:
        # ASCII only, for any terminal; json.dumps does not escape DEL, which is ASCII too.
        return json.dumps(result.json(options.limit), indent=2).replace("\x7f", "\\u007f")
    return result.text(options.limit)
