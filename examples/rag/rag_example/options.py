"""The example's names and options for the command line of `train.py`."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Final

from lightspan_examples.example import Example, Run

MODULES: Final = {"openai-agents": "rag_example.training", "crewai": "rag_example.crew_training"}
"""Framework → module of its app with reward and data; only the chosen module is imported."""
BOTH: Final = "both"


class RagExample(Example):
    """The question answering app as an `Example`."""

    name = "rag"
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

    def data_options(self, options: argparse.Namespace) -> dict[str, Any]:
        return {"cache": options.cache}

    def run_name(self, options: argparse.Namespace) -> str:
        name = super().run_name(options)
        if options.framework != "openai-agents":
            name = f"{name}-{options.framework}"
        return name if options.optimize == BOTH else f"{name}-{options.optimize}"


def trained_agents(run: Run) -> list[str]:
    """Return the agents to train: the agent of `--optimize`, or all trained agents of the app."""
    chosen = run.options.optimize
    return [chosen] if chosen != BOTH else list(run.training.TRAINED)
