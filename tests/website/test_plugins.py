"""Check that docs/reference/plugins.md has every kind of plugin that the code finds."""

from __future__ import annotations

import re
from pathlib import Path

from lightspan import plugins

PAGE = (Path(__file__).parents[2] / "docs/reference/plugins.md").read_text("utf-8")


def test_the_page_has_every_kind_of_plugin() -> None:
    kinds = re.findall(r"^ {4}(\w+)\b", plugins.__doc__ or "", re.MULTILINE)
    assert set(re.findall(r"^\| `lightspan\.(\w+)` \|", PAGE, re.MULTILINE)) == set(kinds)
