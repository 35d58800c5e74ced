"""The command line of the app."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from openai import OpenAIError

from router_example.app import build_graph, chat_model
from router_example.prompts import DEFAULT_MODEL, MODEL_VARIABLE

_EPILOG = """\
environment:
  OPENAI_API_KEY   the endpoint's key; any text if the endpoint wants none
  OPENAI_BASE_URL  an OpenAI-compatible endpoint; api.openai.com if unset
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Route and answer one message, and print the result; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.environ.get("OPENAI_API_KEY"):
        parser.error(
            "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL for an endpoint other than "
            "api.openai.com (a local endpoint takes any key)"
        )
    app = build_graph(chat_model(options.model, temperature=options.temperature))
    try:
        final = app.invoke({"message": options.message})
    except OpenAIError as error:
        endpoint = os.environ.get("OPENAI_BASE_URL") or "api.openai.com"
        print(f"{endpoint} did not answer: {error}", file=sys.stderr)
        return 1
    print(f"to: {final['department'] or 'nobody in particular'}", final["answer"], sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Route and answer a customer's message: prints the department and the answer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("message", help='for example "Where is my umbrella?"')
    parser.add_argument(
        "--model", help=f"the model's name (default: ${MODEL_VARIABLE}, else {DEFAULT_MODEL})"
    )
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    return parser
