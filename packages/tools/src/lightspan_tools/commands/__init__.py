"""Subcommands of `lightspan`: each module has `add(subparsers)`, and imports when it runs."""
