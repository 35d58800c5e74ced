"""Train the text-to-SQL app on this machine, or on a GPU with a real model.

python examples/sql/train.py                     a small model, built here, on the CPU
python examples/sql/train.py --resume            go on after Ctrl-C, a crash or `kill -9`
python examples/sql/train.py --dev               look before training: a few questions, a report
python examples/sql/train.py --air               with intermediate rewards
python examples/sql/train.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --device cuda
python examples/sql/train.py --model ... --data spider     on Spider's questions and databases
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lightspan_examples.recipe import Recipe
from lightspan_examples.script import Example, main


class Sql(Example):
    """The text-to-SQL app."""

    name = "sql"
    metric = "execution accuracy"
    training = "sql_example.training"
    data_help = "Spider's folder, or that of agent-lightning's tutorial, instead of generated data"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--air",
            action="store_true",
            help="intermediate rewards: whether the draft that is rewritten had failed",
        )

    def rl_options(self, options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
        more = self.module(options).AIR_OPTIONS if options.air else {}
        return {**super().rl_options(options, recipe), **more}

    def run_name(self, options: argparse.Namespace) -> str:
        name = super().run_name(options)
        return f"{name}-air" if options.air else name


EXAMPLE = Sql(cache=Path(__file__).parent / ".cache")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__ or ""))
