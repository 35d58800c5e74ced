"""The command line of the app."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from openai import OpenAIError

from quest_example.app import (
    DEFAULT_MODEL,
    MAX_CALLS,
    MODEL_VARIABLE,
    Graph,
    build_graph,
    chat_model,
    is_asked,
    told,
)
from quest_example.world import World
from quest_example.worlds import worlds

_EPILOG = """\
environment:
  OPENAI_API_KEY   the endpoint's key; any text if the endpoint wants none
  OPENAI_BASE_URL  an OpenAI-compatible endpoint; api.openai.com if unset
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play one quest and print what happens; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.environ.get("OPENAI_API_KEY"):
        parser.error(
            "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL for an endpoint other than "
            "api.openai.com (a local endpoint takes any key)"
        )
    model = chat_model(options.model, temperature=options.temperature)
    try:
        final = _play(build_graph(model, max_calls=options.max_calls), world_of(options.seed))
    except OpenAIError as error:
        endpoint = os.environ.get("OPENAI_BASE_URL") or "api.openai.com"
        print(f"{endpoint} did not answer: {error}", file=sys.stderr)
        return 1
    if not final["position"].is_won:
        print(f"not solved with {final['calls']} calls", file=sys.stderr)
        return 1
    print(f"solved with {final['calls']} calls")
    return 0


def world_of(seed: int) -> World:
    """Return the world of a seed."""
    return next(worlds("train", f"demo {seed}"))


def _play(graph: Graph, world: World) -> Any:
    """Play a quest, print the result of each call, and return the graph's final state."""
    final: Any = {}
    for final in graph.stream({"world": world}, stream_mode="values"):
        if final.get("messages") and not is_asked(final):
            print(told(final))
    return final


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Play a quest in a generated text world of rooms, keys and doors.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the world (%(default)s)")
    parser.add_argument(
        "--model", help=f"the model's name (default: ${MODEL_VARIABLE}, else {DEFAULT_MODEL})"
    )
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    parser.add_argument(
        "--max-calls", type=int, default=MAX_CALLS, help="of the model at most (%(default)s)"
    )
    return parser
