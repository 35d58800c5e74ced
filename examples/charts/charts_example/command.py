"""The command line of the app."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAIError

from charts_example.app import DEFAULT_MODEL, MODEL_VARIABLE, build_graph, chat_model
from charts_example.charts import draw
from charts_example.questions import parse
from charts_example.tasks import tasks

_EPILOG = """\
environment:
  OPENAI_API_KEY   the endpoint's key; any text if the endpoint wants none
  OPENAI_BASE_URL  an OpenAI-compatible endpoint; api.openai.com if unset
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question, and print the reading and the answer; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.draw is not None:
        options.draw.write_bytes(_demo())
        print(f"drew {options.draw}")
        return 0
    if options.question is None:
        parser.error('no question: ask like "What is A plus C?"')
    if not os.environ.get("OPENAI_API_KEY"):
        parser.error(
            "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL for an endpoint other than "
            "api.openai.com (a local endpoint takes any key)"
        )
    try:
        parse(options.question)
        chart = _demo() if options.chart is None else options.chart.read_bytes()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return _answer(options, chart)


def _answer(options: argparse.Namespace, chart: bytes) -> int:
    app = build_graph(chat_model(options.model, temperature=options.temperature))
    try:
        final = app.invoke({"chart": chart, "question": options.question})
    except OpenAIError as error:
        endpoint = os.environ.get("OPENAI_BASE_URL") or "api.openai.com"
        print(f"{endpoint} did not answer: {error}", file=sys.stderr)
        return 1
    print(f"read: {final['reading']}")
    if final["answer"] is None:
        print("the reading lacks a value that the question needs", file=sys.stderr)
        return 1
    print(final["answer"])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Answer a question about a chart: prints what was read, and the answer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", nargs="?", help='such as "What is A plus C?"')
    parser.add_argument(
        "--chart", type=Path, metavar="PNG", help="a PNG file (default: a chart drawn now)"
    )
    parser.add_argument(
        "--draw", type=Path, metavar="PNG", help="write the chart that is drawn now, and stop"
    )
    parser.add_argument(
        "--model", help=f"the model's name (default: ${MODEL_VARIABLE}, else {DEFAULT_MODEL})"
    )
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    return parser


def _demo() -> bytes:
    return draw(tasks("train", 1)[0]["chart"])
