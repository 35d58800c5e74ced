"""The `lightspan` command, run by `commands`.

A subcommand is an object with `add(subparsers)` that an entry point of the group
`lightspan.commands` names; those in this folder are modules. Each imports what it runs only when it
runs, so that `--help` is quick.
"""

from lightspan.cli.commands import main

__all__ = ["main"]
