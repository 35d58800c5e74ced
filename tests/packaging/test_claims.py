"""What the documents claim, against what it is claimed of: tables of measurements, versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from statistics import mean

import pytest

import noxfile
from tests.frameworks import matrix

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TITLES = {
    "sql": "| [text to SQL]",
    "math": "| [word problems]",
    "rag": "| [multi-hop questions]",
    "crew": "| [the same, as a crew]",
}
"""Their rows in the README, and the crew's, whose table is in RAG's README."""

PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *(page for folder in ("packages", "examples") for page in ROOT.glob(f"{folder}/*/README.md")),
]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def seeds_of(example: str) -> list[dict[str, str]]:
    """The table of an example's README, a row per seed; `after` is its last evaluation."""
    heading = "### The crew" if example == "crew" else "### Measured"
    page = text_of(f"examples/{'rag' if example == 'crew' else example}/README.md")
    table = page.partition(heading)[2].partition("\n| seed | before |")
    lines = "".join(table[1:]).strip().partition("\n\n")[0].splitlines()
    names, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    names[[n for n, name in enumerate(names) if name.startswith("after")][-1]] = "after"
    found = [dict(zip(names, row, strict=True)) for row in rows]
    assert [row["seed"] for row in found] == ["0", "1", "2"]
    return found


def rounded(said: str, measured: float) -> bool:
    """Whether a figure is a measured one, rounded to two digits."""
    return abs(float(said) - measured) <= 0.005 + 1e-9


def row_of(page: str, start: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.split("|")[1:-1]]


# --- measurements ---------------------------------------------------------------------------
@pytest.mark.parametrize("example", TITLES)
def test_headlines_are_the_means_and_spreads_that_were_measured(example: str) -> None:
    rows = seeds_of(example)
    _, _, *figures, _ = row_of(README, TITLES[example])
    for column, said in zip(("before", "after"), figures, strict=True):
        values = [float(row[column]) for row in rows]
        middle, low, high = re.findall(r"\d\.\d+", said)
        assert rounded(middle, mean(values)), (column, said)
        assert (rounded(low, min(values)), rounded(high, max(values))) == (True, True), said


# --- versions -------------------------------------------------------------------------------
FRAMEWORKS = {
    "langgraph": {"langgraph": "LangGraph", "langchain-core": "langchain-core"},
    "autogen": {"autogen-agentchat": "autogen-agentchat"},
    "openai_agents": {"openai-agents": "OpenAI Agents SDK"},
    "crewai": {"crewai": "CrewAI"},
}
"""Adapter → distribution → its name in the support matrix."""


def declared(adapter: str) -> dict[str, str]:
    """What an adapter needs beside the core: name → floor."""
    project = tomllib.loads(text_of(f"packages/{adapter}/pyproject.toml"))["project"]
    needs = [each for each in project["dependencies"] if not each.startswith("lightspan")]
    return dict(each.split(">=") for each in needs)


def pin(name: str, constraints: str) -> str:
    pinned = re.findall(rf"^{name}==(.+)$", text_of(f"constraints/{constraints}.txt"), re.MULTILINE)
    return str(pinned[0])


@pytest.mark.parametrize("adapter", noxfile.ADAPTERS)
def test_the_support_matrix_is_what_is_declared_and_tested(adapter: str) -> None:
    floors = declared(adapter)
    assert set(floors) == set(FRAMEWORKS[adapter])
    page = unwrapped(text_of(f"packages/{adapter}/README.md"))
    for name, shown in FRAMEWORKS[adapter].items():
        oldest, newest = pin(name, f"{adapter}-oldest"), pin(name, f"{adapter}-latest")
        assert floors[name] == oldest
        assert f"{shown} {oldest} to {newest}" in README
        assert re.search(rf"{name} >= {re.escape(oldest.removesuffix('.0'))}(\.0)?\b", page)


def test_the_sdks_that_are_tested() -> None:
    versions = {
        tuple(map(int, pin("openai", f"{adapter}-{age}").split(".")))
        for adapter in noxfile.ADAPTERS
        for age in ("oldest", "latest")
    }
    oldest, newest = (".".join(map(str, each)) for each in (min(versions), max(versions)))
    assert f"OpenAI SDK ({oldest} to {newest} tested)" in README
    assert f"Anthropic SDK ({pin('anthropic', 'dev')} tested;" in README


# --- frameworks without an adapter -----------------------------------------------------------
def test_the_matrix_of_frameworks_is_what_is_tested() -> None:
    with_agents = {
        name for name, each in noxfile.FRAMEWORKS.items() if each.get("has_agents", True)
    }
    assert {name.replace("-", "_") for name in matrix.MATRIX} == with_agents
    for name, row in matrix.MATRIX.items():
        lacking = {column for column, played in matrix.covers(row).items() if not played}
        assert set(row.gaps) == lacking, f"{name}: each gap has its reason"
    for page in ("README.md", "docs/otel.md"):
        assert f"\n\n{matrix.table()}\n\n" in text_of(page), (
            f"{page} lacks what python tests/frameworks/matrix.py prints"
        )


def test_every_framework_is_tested_in_its_oldest_version_too() -> None:
    """And with either OpenAI SDK, but for those that take only one before 3. Of ADK one passes."""
    before_3 = {"strands-agents", "llama-index"}
    for name, distribution in matrix.DISTRIBUTIONS.items():
        key = name.replace("-", "_")
        files = [f"{key}-{age}" for age in ("oldest", "latest")]
        oldest, latest = (version_of(pin(distribution, file)) for file in files)
        assert (oldest < latest) == (name != "google-adk"), name
        sdks = [version_of(pin("openai", file))[0] for file in files]
        assert sdks == ([2, 2] if name in before_3 else [2, 3]), name
        both = dict.fromkeys(".".join(map(str, each)) for each in (oldest, latest))
        shown = " to ".join(both)
        assert re.search(rf'"{name}"\)?` \({shown}\)', README), f"the README says {shown} of {name}"


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


# --- what can be installed from where ---------------------------------------------------------
def test_nothing_of_ours_is_installed_from_an_index() -> None:
    """It is on none, and the name there is anybody's. The first release changes this, and
    `lightspan.errors.how_to_install` with it."""
    sources = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/**/*.py")]
    bare = {
        f"{path.relative_to(ROOT)}: pip install {asked}"
        for path in [*PAGES, *sources]
        for asked in re.findall(r"pip install ([^`\n]*)", path.read_text())
        if re.search(r"(^|[\s'\"])lightspan", asked)
    }
    assert bare == set()
