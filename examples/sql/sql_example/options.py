"""The example's names and options for the command line of `train.py`."""

from __future__ import annotations

import argparse
from typing import Any

from lightspan_examples.example import Example


class SqlExample(Example):
    """The text-to-SQL app as an `Example`."""

    name = "sql"
    training = "sql_example.training"
    data_help = "Spider's folder, or that of agent-lightning's tutorial, instead of generated data"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--air",
            action="store_true",
            help="intermediate rewards: whether the draft that is rewritten had failed",
        )

    def algorithm_options(self, options: argparse.Namespace) -> dict[str, Any]:
        air = self.module(options).AIR_OPTIONS if options.air else {}
        return {**super().algorithm_options(options), **air}

    def run_name(self, options: argparse.Namespace) -> str:
        name = super().run_name(options)
        return f"{name}-air" if options.air else name
