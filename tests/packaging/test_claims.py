"""Compare what the documents say of versions and of installing with tests and metadata."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.frameworks import matrix
from tests.packaging import environments

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *(page for folder in ("packages", "examples") for page in ROOT.glob(f"{folder}/*/README.md")),
]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def unwrapped(text: str) -> str:
    return " ".join(text.split())


# --- versions -------------------------------------------------------------------------------
FRAMEWORKS = {
    "langgraph": {"langgraph": "LangGraph", "langchain-core": "langchain-core"},
    "autogen": {"autogen-agentchat": "autogen-agentchat"},
    "openai_agents": {"openai-agents": "OpenAI Agents SDK"},
    "crewai": {"crewai": "CrewAI"},
}
"""Adapter → distribution → name of the distribution in the support matrix."""


def declared(adapter: str) -> dict[str, str]:
    """Return name → minimum version of the distributions that an adapter needs besides the core."""
    project = tomllib.loads(text_of(f"packages/{adapter}/pyproject.toml"))["project"]
    needs = [each for each in project["dependencies"] if not each.startswith("lightspan")]
    return dict(each.split(">=") for each in needs)


def pin(name: str, constraints: str) -> str:
    pinned = re.findall(rf"^{name}==(.+)$", text_of(f"constraints/{constraints}.txt"), re.MULTILINE)
    return str(pinned[0])


@pytest.mark.parametrize("adapter", environments.ADAPTERS)
def test_the_support_matrix_is_what_is_declared_and_tested(adapter: str) -> None:
    floors = declared(adapter)
    assert set(floors) == set(FRAMEWORKS[adapter])
    guide = f"docs/guides/{adapter.replace('_', '-')}.md"
    pages = [unwrapped(text_of(name)) for name in (guide, f"packages/{adapter}/README.md")]
    for name, shown in FRAMEWORKS[adapter].items():
        oldest, newest = pin(name, f"{adapter}-oldest"), pin(name, f"{adapter}-latest")
        assert floors[name] == oldest
        assert f"{shown} {oldest} to {newest}" in README
        floor = rf"{name} >= {re.escape(oldest.removesuffix('.0'))}(\.0)?\b"
        assert all(re.search(floor, page) for page in pages)


# --- frameworks without an adapter -----------------------------------------------------------
def test_the_matrix_of_frameworks_is_what_is_tested() -> None:
    with_agents = {
        name for name, each in environments.FRAMEWORKS.items() if each.get("has_agents", True)
    }
    assert {name.replace("-", "_") for name in matrix.MATRIX} == with_agents
    for name, row in matrix.MATRIX.items():
        lacking = {column for column, played in matrix.covers(row).items() if not played}
        assert set(row.gaps) == lacking, f"{name}: each gap has its reason"
    for page in ("docs/guides/opentelemetry.md",):
        assert f"\n\n{matrix.table()}\n\n" in text_of(page), (
            f"{page} lacks what python tests/frameworks/matrix.py prints"
        )


# --- what can be installed from where ---------------------------------------------------------
def test_nothing_of_ours_is_installed_from_an_index() -> None:
    """Check that no document installs lightspan from an index, where it is not published.

    Anybody could register the name. The first release changes this, and
    `lightspan.errors.how_to_install` with it.
    """
    sources = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/**/*.py")]
    bare = {
        f"{path.relative_to(ROOT)}: pip install {asked}"
        for path in [*PAGES, *sources]
        for asked in re.findall(r"pip install ([^`\n]*)", path.read_text())
        if re.search(r"(^|[\s'\"])lightspan", asked)
    }
    assert bare == set()
