"""The `lightspan` command, run by `commands`.

Each subcommand is a module here of its own name (`dev`, `runner`, `inspect`, `rescore`, `export`,
`feedback`, `import_`, `serve`, `prune`) with `add(commands)`, and a word in `commands.COMMANDS`. It
imports what it runs only when it runs, so that `--help` is quick. `_query` has the options that two
share.
"""

from lightspan.cli.commands import main

__all__ = ["main"]
