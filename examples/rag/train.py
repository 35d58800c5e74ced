"""Train the question answering app on this machine, or on a GPU with a real model.

python examples/rag/train.py                     a small model, built here, on the CPU
python examples/rag/train.py --resume            go on after Ctrl-C, a crash or `kill -9`
python examples/rag/train.py --dev               look before training: a few questions, a report
python examples/rag/train.py --framework crewai  the app as a crew; in an environment with CrewAI
python examples/rag/train.py --framework crewai --optimize searcher
python examples/rag/train.py --model Qwen/Qwen2.5-1.5B-Instruct --device cuda
python examples/rag/train.py --model ... --data DIR        on MuSiQue, or documents of your own
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, Final

from lightspan_examples.recipe import Recipe
from lightspan_examples.script import Example, main

MODULES: Final = {"openai-agents": "rag_example.training", "crewai": "rag_example.crew_training"}
"""The app of each framework, with its rollout; only the chosen one is imported."""
BOTH: Final = "both"


class Rag(Example):
    """The question answering app."""

    name = "rag"
    metric = "0.9 F1 + 0.1 form"
    data_help = "MuSiQue's folder, or one of your own documents and questions"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--framework",
            choices=list(MODULES),
            default="openai-agents",
            help="what the app is written with (openai-agents)",
        )
        parser.add_argument(
            "--optimize",
            choices=("searcher", "answerer", BOTH),
            default=BOTH,
            help="which of the crew's agents learn (both)",
        )

    def module(self, options: argparse.Namespace) -> Any:
        return importlib.import_module(MODULES[options.framework])

    def rl_options(self, options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
        rules = super().rl_options(options, recipe)
        if options.optimize != BOTH:
            rules["optimize"] = [options.optimize]
        return rules

    def data_options(self, options: argparse.Namespace) -> dict[str, Any]:
        return {"cache": options.cache}

    def run_name(self, options: argparse.Namespace) -> str:
        name = super().run_name(options)
        if options.framework != "openai-agents":
            name = f"{name}-{options.framework}"
        return name if options.optimize == BOTH else f"{name}-{options.optimize}"


EXAMPLE = Rag(cache=Path(__file__).parent / ".cache")

if __name__ == "__main__":
    sys.exit(main(EXAMPLE, __doc__ or ""))
