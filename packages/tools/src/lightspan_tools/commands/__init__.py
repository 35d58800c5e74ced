"""Subcommands of `lightspan`.

Each module has a function `add`, which adds one subcommand to a parser. Modules that are slow to
import are imported only when the subcommand runs.
"""
