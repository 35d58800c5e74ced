"""Compare pages of docs/reference that are written by hand with the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


def strings() -> set[str]:
    """Return all texts in the packages' code, except docstrings."""
    found: set[str] = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs
        }
    return found


def test_the_page_has_all_environment_variables() -> None:
    read = {text for text in strings() if re.fullmatch(r"LIGHTSPAN_[A-Z_]*[A-Z]", text)}
    page = (REFERENCE / "environment-variables.md").read_text("utf-8")
    page = page.partition("## Development of lightspan")[0]
    assert read == set(re.findall(r"`(LIGHTSPAN_[A-Z_]+)`", page))
