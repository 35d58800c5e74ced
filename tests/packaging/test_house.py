"""Check the layout that CONTRIBUTING and pyproject.toml describe."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import noxfile
import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages" / "core" / "src" / "lightspan"
FOLDERS = sorted(path.parent for path in CORE.rglob("__init__.py") if path.parent != CORE)


def test_the_tests_of_core_have_its_folders() -> None:
    tested = {path.name for path in (ROOT / "tests" / "core").iterdir() if path.is_dir()}
    assert {path.name for path in FOLDERS if path.parent == CORE} - tested == set()


def test_the_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text))
    assert named
    missing = [name for name in named if not ((CORE / name).exists() or (ROOT / name).exists())]
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
    graph = {name_of(path): imported(path) for path in CORE.rglob("*.py")}
    done: set[str] = set()
    for start in graph:
        walk(start, graph, [], done)


def name_of(path: Path) -> str:
    parts = path.relative_to(CORE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """What a module imports at its top level, as modules of the core."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in inner if is_module(name)}
            found |= modules or {node.module}
    return {name for name in found if name.startswith("lightspan.")}


def is_module(name: str) -> bool:
    path = CORE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def walk(name: str, graph: dict[str, set[str]], trail: list[str], done: set[str]) -> None:
    assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
    if name in done:
        return
    for other in sorted(graph.get(name, ())):
        walk(other, graph, [*trail, name], done)
    done.add(name)
