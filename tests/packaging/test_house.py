"""Check the layout that CONTRIBUTING and pyproject.toml describe."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import noxfile

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages" / "core" / "src" / "lightspan"
PACKAGES = {path.parent.name: path for path in ROOT.glob("packages/*/src")}


def test_the_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text))
    assert named
    places = [CORE, ROOT, *ROOT.glob("packages/*/src/*")]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert missing == []


@pytest.mark.parametrize("adapter", noxfile.ADAPTERS)
def test_an_adapter_is_checked_like_the_others(adapter: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    package = f"lightspan_{adapter}"
    contracts = {each["id"]: each for each in project["importlinter"]["contracts"]}
    assert package in project["ruff"]["lint"]["isort"]["known-first-party"]
    assert f"packages/{adapter}/src" in project["mypy"]["mypy_path"].split(":")
    assert package in project["importlinter"]["root_packages"]
    assert package in contracts["capture"]["source_modules"]


def test_no_circle_of_imports() -> None:
    """Those that are made when a module is loaded; the order of folders is import-linter's."""
    graph = {name_of(path): imported(path) for path in sources()}
    done: set[str] = set()
    for start in graph:
        walk(start, graph, [], done)


def sources() -> list[Path]:
    return [path for folder in PACKAGES.values() for path in folder.rglob("*.py")]


def name_of(path: Path) -> str:
    parts = path.parts[path.parts.index("src") + 1 :]
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


MODULES = {name_of(path) for path in sources()}


def imported(path: Path) -> set[str]:
    """Return the modules of ours that a module imports at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & MODULES or {node.module}
    return names & MODULES


def walk(name: str, graph: dict[str, set[str]], trail: list[str], done: set[str]) -> None:
    assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
    if name in done:
        return
    for other in sorted(graph.get(name, ())):
        walk(other, graph, [*trail, name], done)
    done.add(name)
