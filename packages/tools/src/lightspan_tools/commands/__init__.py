"""Subcommands of `lightspan`.

Each module has a function `add`, which adds one subcommand to a parser. Slow imports are made when
the subcommand runs.
"""
