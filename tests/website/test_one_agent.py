"""Check the patterns and the error that docs/guides/one-agent.md shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightspan import LightningRL
from lightspan.errors import UnknownAgentError
from lightspan.lightning.selection import check_agents
from lightspan.schema.routing import matches

PAGE = (Path(__file__).parents[2] / "docs/guides/one-agent.md").read_text("utf-8")
PATHS, ERROR = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
TABLE = PAGE.partition("| pattern | matches |")[2].partition("\n\n")[0]
ROWS = re.findall(r"^\| `(\S+)` \| (.*) \|$", TABLE, re.MULTILINE)


@pytest.mark.parametrize(("pattern", "matched"), ROWS)
def test_a_pattern_matches_the_paths_of_its_row(pattern: str, matched: str) -> None:
    found = [path for path in PATHS.split() if matches(pattern, path)]
    assert ", ".join(f"`{path}`" for path in found) == matched


def test_the_table_has_rows() -> None:
    assert len(ROWS) == 8


def test_the_error_of_a_misspelt_name() -> None:
    [name] = re.findall(r'optimize="(writt\w+)"', PAGE)
    [listed] = re.findall(r"agents=(\[.*\])\)", PAGE)
    routing = LightningRL("model", optimize=name, frozen="base").routing()
    with pytest.raises(UnknownAgentError) as raised:
        check_agents(routing, re.findall(r'"([^"]+)"', listed))
    assert f"lightspan.errors.UnknownAgentError: {raised.value}" == ERROR
