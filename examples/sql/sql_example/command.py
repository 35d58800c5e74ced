"""The command line of the app."""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from openai import OpenAIError

from sql_example.app import DEFAULT_MODEL, MAX_TURNS, MODEL_VARIABLE, build_graph, chat_model
from sql_example.database import schema_text

_EPILOG = """\
environment:
  OPENAI_API_KEY   the endpoint's key; any text if the endpoint wants none
  OPENAI_BASE_URL  an OpenAI-compatible endpoint; api.openai.com if unset
"""

_DEMO = """
CREATE TABLE singers (id INTEGER PRIMARY KEY, name TEXT, age INTEGER, country TEXT);
CREATE TABLE concerts (
    id INTEGER PRIMARY KEY, title TEXT, year INTEGER, city TEXT,
    singers_id INTEGER REFERENCES singers(id)
);
INSERT INTO singers VALUES
    (1, 'Ada', 31, 'France'), (2, 'Ben', 52, 'Spain'), (3, 'Cleo', 24, 'France'),
    (4, 'Dan', 43, 'Japan'), (5, 'Eva', 29, 'Kenya'), (6, 'Finn', 61, 'Spain');
INSERT INTO concerts VALUES
    (1, 'Dawn', 2019, 'Paris', 1), (2, 'Noon', 2021, 'Rome', 1), (3, 'Dusk', 2021, 'Oslo', 2),
    (4, 'Tide', 2022, 'Lima', 3), (5, 'Moon', 2023, 'Paris', 5);
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question, and print the query and its result; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not os.environ.get("OPENAI_API_KEY"):
        parser.error(
            "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL for an endpoint other than "
            "api.openai.com (a local endpoint takes any key)"
        )
    with TemporaryDirectory() as directory:
        db = options.db or _demo_database(Path(directory))
        try:
            schema_text(db)
        except (FileNotFoundError, ValueError) as error:
            parser.error(f"--db: {error}")
        return _answer(options, db)


def _answer(options: argparse.Namespace, db: Path) -> int:
    model = chat_model(options.model, temperature=options.temperature)
    app = build_graph(model, max_turns=options.max_turns)
    try:
        final = app.invoke({"question": options.question, "db": str(db)})
    except OpenAIError as error:
        endpoint = os.environ.get("OPENAI_BASE_URL") or "api.openai.com"
        print(f"{endpoint} did not answer: {error}", file=sys.stderr)
        return 1
    print(final["query"], final["outcome"], sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Answer a question about a SQLite database: prints the query and its result.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("question", help='for example "How many singers are there?"')
    parser.add_argument("--db", type=Path, help="the database file (default: a small demo)")
    parser.add_argument(
        "--model", help=f"the model's name (default: ${MODEL_VARIABLE}, else {DEFAULT_MODEL})"
    )
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    parser.add_argument(
        "--max-turns", type=int, default=MAX_TURNS, help="queries written at most (%(default)s)"
    )
    return parser


def _demo_database(directory: Path) -> Path:
    path = directory / "singers.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(_DEMO)
    return path
