"""The `lightspan` command.

A subcommand is a module or another object with a function `add(commands)`, which adds its parser to
argparse's subparsers. Each entry point of the group `lightspan.commands` names a subcommand. A
subcommand imports its implementation only when it runs, so that `--help` is fast.
"""

from lightspan.cli.commands import main

__all__ = ["main"]
