"""The example's names and options for the command line of `train.py`."""

from __future__ import annotations

import argparse
import importlib
from typing import Any, Final

from lightspan_examples.example import Example

MODULES: Final = {
    "langgraph": "router_example.training",
    "pydantic-ai": "router_example.pydantic_ai_training",
}
"""Framework → module of its app with reward and data; only the chosen module is imported."""


class RouterExample(Example):
    """The customer service app as an `Example`."""

    name = "router"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(lora=True, held_out=320)
        parser.add_argument(
            "--framework",
            choices=list(MODULES),
            default="langgraph",
            help="what the app is written with (langgraph)",
        )
        parser.add_argument(
            "--full",
            dest="lora",
            action="store_false",
            help="train the full weights, not adapters",
        )
        parser.add_argument(
            "--policies",
            choices=("shared", "separate"),
            default="shared",
            help="one policy behind both agents, or one behind each (shared)",
        )

    def module(self, options: argparse.Namespace) -> Any:
        return importlib.import_module(MODULES[options.framework])

    def algorithm_options(self, options: argparse.Namespace) -> dict[str, Any]:
        training = self.module(options)
        lora = training.LORA if options.lora else None
        optimize = training.optimized(options.policies, lora)
        return {"optimize": optimize, "lora": lora, "seed": options.seed}

    def run_name(self, options: argparse.Namespace) -> str:
        name = super().run_name(options)
        if options.framework != "langgraph":
            name = f"{name}-{options.framework}"
        return name if options.policies == "shared" else f"{name}-{options.policies}"
