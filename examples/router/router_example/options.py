"""The command line of `train.py`, and the names that follow from it."""

from __future__ import annotations

import argparse
from typing import Any

from lightspan_examples.example import Example


class RouterExample(Example):
    """The customer service app."""

    name = "router"
    training = "router_example.training"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        # a laptop's: a pass of 2,048 tokens keeps 3 GB more for its gradients
        parser.set_defaults(lora=True, held_out=320, token_budget=256)
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

    def algorithm_options(self, options: argparse.Namespace) -> dict[str, Any]:
        training = self.module(options)
        lora = training.LORA if options.lora else None
        optimize = training.optimized(options.policies, lora)
        return {"optimize": optimize, "lora": lora, "seed": options.seed}

    def run_name(self, options: argparse.Namespace) -> str:
        name = super().run_name(options)
        return name if options.policies == "shared" else f"{name}-{options.policies}"
