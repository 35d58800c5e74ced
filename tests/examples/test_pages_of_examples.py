"""Compare the pages about the examples with their code, and with the tables of docs/evidence."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import mean
from textwrap import indent
from typing import Any

import pytest

from lightspan_examples.example import Example, Run
from lightspan_examples.options import add_options
from math_example.options import MathExample
from quest_example.options import QuestExample
from rag_example.options import RagExample
from router_example.options import RouterExample
from sql_example.options import SqlExample
from tests.apps.pages import blocks

ROOT = Path(__file__).parents[2]
TUTORIALS = ("tutorials/sql.md", "tutorials/router.md")
EXAMPLES = (SqlExample, MathExample, RagExample, RouterExample, QuestExample)
MEASURED = {
    "sql": ("sql", 1),
    "math": ("math", 1),
    "rag": ("rag", 1),
    "rag-crewai": ("rag", 2),
    "router": ("router", 1),
    "quest": ("quest", 1),
    "textworld": ("textworld", 1),
    "charts": ("charts", 1),
    "terminal": ("terminal", 1),
}
"""Name → page of docs/evidence, and which of its tables of seeds."""
OF_README = ("sql", "math", "rag", "rag-crewai")
"""In the order of the table in README.md."""


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


# --- code in the tutorials -------------------------------------------------------------------
@pytest.mark.parametrize("page", TUTORIALS)
def test_code_of_the_repository_is_quoted_as_it_is(page: str) -> None:
    quoted = {
        name: text
        for kind, name, text in blocks(page)
        if kind == "python" and name and name.startswith("examples/")
    }
    assert len(quoted) >= 3
    changed = [
        name
        for name, text in quoted.items()
        if text not in read(name) and indent(text, " " * 4) not in read(name)
    ]
    assert changed == []


# --- options ---------------------------------------------------------------------------------
def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {max(action.option_strings, key=len) for action in parser._actions} - {"--help"}


def not_called(run: Run) -> Any:
    raise AssertionError(run)


def test_the_table_of_shared_options_is_complete() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "sql", Path(), "a folder")
    table = read("examples/common/README.md").partition("## Modules")[0]
    rows = re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)
    named = {each for row in rows for each in re.findall(r"`(--[\w-]+)", row)}
    assert named == options_of(parser)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_options_of_each_example_are_in_its_readme(kind: type[Example]) -> None:
    parser = argparse.ArgumentParser()
    kind(not_called, not_called, cache=Path()).add_arguments(parser)
    named = set(re.findall(r"`(--[\w-]+)", read(f"examples/{kind.name}/README.md")))
    assert options_of(parser) <= named


# --- figures ---------------------------------------------------------------------------------
def tables_of_seeds(page: str) -> Iterator[list[tuple[Decimal, Decimal]]]:
    """Yield (before, after) of each seed, of each table of a page that begins with the seed."""
    for table in re.findall(r"(?:^\|.*\n)+", read(f"docs/evidence/{page}.md"), re.MULTILINE):
        head, _, *rows = [
            [cell.strip(" *") for cell in line.strip("|\n").split("|")]
            for line in table.splitlines()
        ]
        if head[0] != "seed" or "policies" in head:
            continue
        if "before → after" in head:
            pairs = [row[head.index("before → after")].split(" → ") for row in rows]
        else:
            last = max(
                index for index, name in enumerate(head) if re.fullmatch(r"after( \d+)?", name)
            )
            pairs = [[row[head.index("before")], row[last]] for row in rows]
        yield [(Decimal(before), Decimal(after)) for before, after in pairs]


def short(value: Decimal) -> str:
    return str(value.quantize(Decimal("0.01"), ROUND_HALF_UP))


@pytest.mark.parametrize("name", MEASURED)
def test_gains_are_those_of_the_evidence(name: str) -> None:
    page, number = MEASURED[name]
    seeds = list(tables_of_seeds(page))[number - 1]
    assert len(seeds) == 3
    said = ", ".join(f"{short(before)} → {short(after)}" for before, after in seeds)
    for place in ("docs/examples.md", "docs/evidence/index.md"):
        assert f"| {said} |" in read(place), f"{place} lacks {said}"


@pytest.mark.parametrize("name", OF_README)
def test_means_in_the_readme_are_those_of_the_evidence(name: str) -> None:
    page, number = MEASURED[name]
    seeds = list(tables_of_seeds(page))[number - 1]
    cells = [
        f"{short(mean(values))} ({short(min(values))} to {short(max(values))})"
        for values in zip(*seeds, strict=True)
    ]
    assert f"| {' | '.join(cells)} |" in read("README.md")


def test_gains_of_the_router_in_the_readme() -> None:
    real, permuted = tables_of_seeds("router")
    ends = [short(after) for _, after in real]
    changes = [f"{after - before:+.2f}" for before, after in permuted]
    text = " ".join(read("README.md").split())
    assert f"from {short(real[0][0])} to {ends[0]}, {ends[1]} and {ends[2]} in three seeds" in text
    assert f"changed by {changes[0]}, {changes[1]} and {changes[2]}." in text
