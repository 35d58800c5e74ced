"""The command line of the app."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAIError

from desk_example.app import DEFAULT_MODEL, MODEL_VARIABLE, PROMPT, route


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the department that one message is for; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Say which department a customer's message is for.",
        epilog="OPENAI_BASE_URL names an OpenAI-compatible endpoint, OPENAI_API_KEY its key.",
    )
    parser.add_argument("message", help='for example "Where is my umbrella?"')
    parser.add_argument("--prompt", type=Path, help="a file with another prompt")
    parser.add_argument(
        "--model", help=f"the model's name (default: ${MODEL_VARIABLE}, else {DEFAULT_MODEL})"
    )
    options = parser.parse_args(arguments)
    if not os.environ.get("OPENAI_API_KEY"):
        parser.error("OPENAI_API_KEY is not set: set it (a local endpoint takes any key)")
    try:
        prompt = PROMPT if options.prompt is None else options.prompt.read_text("utf-8")
        department = route(options.message, prompt, options.model)
    except (OpenAIError, OSError) as error:
        print(f"app.py: {error}", file=sys.stderr)
        return 1
    print(f"to: {department or 'nobody in particular'}")
    return 0
