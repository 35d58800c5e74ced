"""Check the order of the site's pages (mkdocs.yml) and the README's size."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def ordered() -> list[str]:
    """Return the pages that mkdocs.yml orders."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    return re.findall(r"([\w/.-]+\.(?:md|ipynb))$", nav, re.MULTILINE)


def test_the_order_has_every_page_once() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.glob("**/*.md")}
    assert sorted(ordered()) == sorted(pages)


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900
