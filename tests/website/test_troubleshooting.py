"""Check that the headings of docs/troubleshooting.md are messages of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
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
