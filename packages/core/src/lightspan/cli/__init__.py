"""The `lightspan` command.

A subcommand is an object with `add(subparsers)`, named by an entry point of the group
`lightspan.commands`; those in this folder are modules. A subcommand imports its implementation only
when it runs, so that `--help` is fast.
"""

from lightspan.cli.commands import main

__all__ = ["main"]
