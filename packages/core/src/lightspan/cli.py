"""The `lightspan` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightspan import __version__
from lightspan.errors import LightspanError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        text: str = options.run(options)
    except LightspanError as error:
        print(f"lightspan: {error}", file=sys.stderr)
        return 1
    try:
        print(text)
    except BrokenPipeError:  # `lightspan inspect … | head`
        sys.stderr.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightspan", description="Make the AI agents you already have learn."
    )
    parser.add_argument("--version", action="version", version=f"lightspan {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="show a run, a rollout or a call",
        description="Show a run; with a rollout, its span tree, the coverage of its calls and why "
        "each was trained with which advantage; with a call, its tokens and text too. The start "
        "of an id is enough.",
    )
    inspect.add_argument("run_folder", type=Path, metavar="RUN", help="a folder such as runs/sql")
    inspect.add_argument("rollout", nargs="?", metavar="ROLLOUT")
    inspect.add_argument("call", nargs="?", metavar="CALL")
    inspect.set_defaults(run=_inspect)
    return parser


def _inspect(options: argparse.Namespace) -> str:
    from lightspan.inspection import inspect_run

    return inspect_run(options.run_folder, options.rollout, options.call)


if __name__ == "__main__":
    sys.exit(main())
