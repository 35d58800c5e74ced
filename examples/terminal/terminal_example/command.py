"""The command line of the app."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from terminal_example import sandbox
from terminal_example.app import (
    DEFAULT_MODEL,
    LIMIT,
    MODEL_VARIABLE,
    chat_model,
    repair,
    solved,
)
from terminal_example.packages import generate

_EPILOG = """\
environment:
  OPENAI_API_KEY   the endpoint's key; any text if the endpoint wants none
  OPENAI_BASE_URL  an OpenAI-compatible endpoint; api.openai.com if unset
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Repair one generated package and print the session; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.environ.get("OPENAI_API_KEY"):
        parser.error(
            "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL for an endpoint other than "
            "api.openai.com (a local endpoint takes any key)"
        )
    try:
        sandbox.check()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    from openai import OpenAIError  # LiteLLM's errors are OpenAI's

    [task] = generate("dev", seed=options.seed, count=1)
    model = chat_model(options.model, temperature=options.temperature)
    try:
        session = repair(task, model, limit=options.limit)
    except OpenAIError as error:
        endpoint = os.environ.get("OPENAI_BASE_URL") or "api.openai.com"
        print(f"{endpoint} did not answer: {error}", file=sys.stderr)
        return 1
    for message in session.messages[1:]:
        print(f"--- {message['role']}\n{message['content']}".rstrip())
    if not solved(task, session):
        print(f"not repaired ({session.status})", file=sys.stderr)
        return 1
    print("repaired: all tests pass")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Repair a generated Python package with mini-swe-agent, in bubblewrap.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the package (%(default)s)")
    parser.add_argument(
        "--model", help=f"the model's name (default: ${MODEL_VARIABLE}, else {DEFAULT_MODEL})"
    )
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    parser.add_argument(
        "--limit", type=int, default=LIMIT, help="of model calls in a session (%(default)s)"
    )
    return parser
