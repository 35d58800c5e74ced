"""Check docs/troubleshooting.md: headings are messages, and messages name their headings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lightspan.errors import ConfigError, page_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
TABLE = ROOT / "packages/core/src/lightspan/troubleshooting.tsv"
GAP = "…"
"""What stands for a value in a heading, and for a placeholder in a message."""


def text_of(node: ast.AST) -> str | None:
    """Return the text of an expression, with `GAP` for its placeholders; None if it has none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) or GAP for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{text_of(left) or GAP}{text_of(right) or GAP}"
        case _:
            return None


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """Return all texts of the packages."""
    return [
        text
        for path in sorted(ROOT.glob("packages/*/src/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (text := text_of(node))
    ]


@pytest.mark.parametrize("heading", re.findall(r"^### (.*)$", PAGE, re.MULTILINE))
def test_a_heading_is_a_message(heading: str, messages: list[str]) -> None:
    """Check that a message contains the heading's words in order, with values between them."""
    parts = [re.escape(part) for part in heading.split(GAP) if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(message) for message in messages)


# --- the reference in a message -----------------------------------------------------------------
def test_each_anchor_of_the_table_exists_in_the_page() -> None:
    """Headings are those of the page, and the anchors those of links that `nox -s docs` checks."""
    rows = [row.split("\t") for row in TABLE.read_text("utf-8").splitlines()]
    headings = [heading for _, heading in rows]
    assert sorted(headings) == sorted(re.findall(r"^### (.*)$", PAGE, re.MULTILINE))
    assert headings == sorted(headings, key=len, reverse=True)
    anchors = [anchor for anchor, _ in rows]
    assert len({*anchors}) == len(anchors)
    linked = re.findall(r"\(#([a-z0-9-]+)\)", PAGE)
    sections = {heading.lower().replace(" ", "-") for heading in re.findall("(?m)^## (.*)$", PAGE)}
    assert {*linked} - sections <= {*anchors}
    for page in ROOT.glob("docs/**/*.md"):
        links = re.findall(r"troubleshooting\.md#([a-z0-9-]+)", page.read_text("utf-8"))
        assert {*links} <= {*anchors}, page


@pytest.mark.parametrize(
    ("message", "anchor"),
    [
        ("3 of 4 failed in step 7, for example no", "of-failed-in-step"),
        ("the model folder x does not exist", "the-model-folder-does-not-exist"),
        ("runs/a holds a run already: resume it", "holds-a-run-already"),
        ("tasks[3] is not JSON: a set. A task is made of", "is-not-json"),
        (
            "fit would make about 6,800 calls to endpoints",
            "fit-would-make-about-calls-to-endpoints",
        ),
        ("langgraph 0.1 is too old: it needs 1.0", "is-too-old"),
        ("something else", ""),
        ("", ""),
    ],
)
def test_a_message_names_its_place_on_the_page(message: str, anchor: str) -> None:
    assert page_of(message) == (anchor and f"docs/troubleshooting.md#{anchor}")


def test_an_error_names_its_place_in_a_note() -> None:
    error = ConfigError("runs/a holds a run already: resume it")
    assert error.__notes__ == ["see docs/troubleshooting.md#holds-a-run-already"]
    assert not hasattr(ConfigError("lora=3 is no LoRA"), "__notes__")
