"""The command line of the app."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import OpenAIError

from textworld_example.app import (
    DEFAULT_MODEL,
    LIMIT,
    MODEL_VARIABLE,
    Graph,
    build_graph,
    chat_model,
)
from textworld_example.games import make

_EPILOG = """\
environment:
  OPENAI_API_KEY   the endpoint's key; any text if the endpoint wants none
  OPENAI_BASE_URL  an OpenAI-compatible endpoint; api.openai.com if unset
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play one game and print its commands; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.environ.get("OPENAI_API_KEY"):
        parser.error(
            "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL for an endpoint other than "
            "api.openai.com (a local endpoint takes any key)"
        )
    model = chat_model(options.model, temperature=options.temperature)
    graph = build_graph(model, limit=options.limit)
    try:
        with tempfile.TemporaryDirectory() as folder:
            game = options.game or make(options.seed, Path(folder) / "game.z8")
            final = _play(graph, str(game))
    except OpenAIError as error:
        endpoint = os.environ.get("OPENAI_BASE_URL") or "api.openai.com"
        print(f"{endpoint} did not answer: {error}", file=sys.stderr)
        return 1
    if not final["now"].won:
        print(f"not won with {len(final['done'])} commands", file=sys.stderr)
        return 1
    print(f"won with {len(final['done'])} commands")
    return 0


def _play(graph: Graph, game: str) -> Any:
    """Play a game, print each command, and return the graph's final state."""
    final: Any = {}
    printed = 0
    for final in graph.stream({"game": game}, stream_mode="values"):
        for command in final.get("done", [])[printed:]:
            print(f"> {command}")
            printed += 1
    return final


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Play a game that TextWorld generates: find the coin.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the game (%(default)s)")
    parser.add_argument(
        "--game", type=Path, metavar="FILE", help="a .z8 file in place of a generated game"
    )
    parser.add_argument(
        "--model", help=f"the model's name (default: ${MODEL_VARIABLE}, else {DEFAULT_MODEL})"
    )
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    parser.add_argument(
        "--limit", type=int, default=LIMIT, help="of commands in a game (%(default)s)"
    )
    return parser
