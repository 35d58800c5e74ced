"""The example's names and options for the command line of `train.py`."""

from __future__ import annotations

import argparse
from typing import Any

from lightspan_examples.example import Example


class QuestExample(Example):
    """The text adventure as an `Example`."""

    name = "quest"
    training = "quest_example.training"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--credit",
            default="terminal",
            metavar="RULE",
            help="how the reward is divided among the calls, as LightningRL names it (terminal)",
        )

    def algorithm_options(self, options: argparse.Namespace) -> dict[str, Any]:
        return {**super().algorithm_options(options), "credit": options.credit}

    def run_name(self, options: argparse.Namespace) -> str:
        name = super().run_name(options)
        return name if options.credit == "terminal" else f"{name}-{options.credit}"
