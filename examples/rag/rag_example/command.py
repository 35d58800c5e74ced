"""The command line of the app."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from openai import AsyncOpenAI, OpenAIError

from rag_example.app import DEFAULT_MODEL, MAX_SEARCHES, MODEL_VARIABLE, ask, run_config
from rag_example.index import Index, Passage
from rag_example.library import PASSAGES, Library
from rag_example.prompts import parse_answer

_EPILOG = """\
environment:
  OPENAI_API_KEY   the endpoint's key; any text if the endpoint wants none
  OPENAI_BASE_URL  an OpenAI-compatible endpoint; api.openai.com if unset
"""

_DEMO = (
    ("Silent Garden", "A novel of 1931, written by Ada Brook."),
    ("Golden River", "A film of 1954, written by Ben Hale after Silent Garden."),
    ("Ada Brook", "A novelist, born in Port Alder. She worked for Delta Press."),
    ("Ben Hale", "A screenwriter, born in Lake Birch and married to Tess Marsh."),
    ("Delta Press", "A publisher based in New Cedar, started by Otto Pike."),
    ("Port Alder", "A harbour town on the river Tarn. Its mayor is Vera Nash."),
    ("Lake Birch", "A village of four hundred people. Its mayor is Karl Lowe."),
    ("Otto Pike", "A printer, born in Lake Birch."),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question and print the answer; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.environ.get("OPENAI_API_KEY"):
        parser.error(
            "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL for an endpoint other than "
            "api.openai.com (a local endpoint takes any key)"
        )
    passages = _demo() if options.documents is None else _read(options.documents, parser)
    library = Library(Index.build(passages), passages=options.passages)
    return _answer(options, library)


def _answer(options: argparse.Namespace, library: Library) -> int:
    try:
        said = asyncio.run(_ask(options, library))
    except OpenAIError as error:
        endpoint = os.environ.get("OPENAI_BASE_URL") or "api.openai.com"
        print(f"{endpoint} did not answer: {error}", file=sys.stderr)
        return 1
    if not said:
        print(f"no answer after {options.max_searches} searches", file=sys.stderr)
        return 1
    print(parse_answer(said))
    return 0


async def _ask(options: argparse.Namespace, library: Library) -> str:
    async with AsyncOpenAI() as client:
        config = run_config(options.model, client=client, temperature=options.temperature)
        question, searches = options.question, options.max_searches
        return await ask(question, library, config=config, max_searches=searches)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Answer a question from documents, with as many searches as it takes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "question", help='for example "Who is the mayor of the birthplace of Ada Brook?"'
    )
    parser.add_argument(
        "--documents",
        type=Path,
        metavar="DIR",
        help="a folder of text and Markdown files (default: a small demo)",
    )
    parser.add_argument(
        "--model", help=f"the model's name (default: ${MODEL_VARIABLE}, else {DEFAULT_MODEL})"
    )
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    parser.add_argument(
        "--max-searches", type=int, default=MAX_SEARCHES, help="searches at most (%(default)s)"
    )
    parser.add_argument(
        "--passages", type=int, default=PASSAGES, help="that a search shows (%(default)s)"
    )
    return parser


def _demo() -> list[Passage]:
    return [Passage(str(number), *told) for number, told in enumerate(_DEMO)]


def _read(folder: Path, parser: argparse.ArgumentParser) -> list[Passage]:
    """Return the passages of a folder, and print the files that were left out."""
    from lightspan.errors import DataError
    from rag_example.documents import read_passages

    try:
        passages, skipped = read_passages(folder)
    except DataError as error:
        parser.error(f"--documents: {error}")
    for reason in skipped:
        print(f"left out {reason}", file=sys.stderr)
    return passages
