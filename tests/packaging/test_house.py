"""The house is as CONTRIBUTING and design say: folders that name their files, names used once."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import noxfile
import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages" / "core" / "src" / "lightspan"
TOO_LONG = 700
"""Lines of a file of tests or suites, at most."""
TRAIN = 45
"""Lines of code of an example's train.py, at most: it shows the training, and imports the rest."""

FOLDERS = sorted(path.parent for path in CORE.rglob("__init__.py") if path.parent != CORE)
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
RETIRED = {
    # of modules: gerunds, and what stood beside its like
    *("recording", "recorded", "served", "bypassing", "connecting", "resuming", "joining"),
    *("exporting", "estimating", "measuring", "reading", "writing", "choosing", "scoring"),
}
ONCE = ("Session", "Call")
"""Names of classes that each have one meaning."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.relative_to(CORE).as_posix())
def test_a_folder_names_what_lies_in_it(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    within = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    unnamed = {name for name in files | within if not re.search(rf"\b{name}\b", said)}
    assert unnamed == set()


def test_retired_names_of_modules_stay_retired() -> None:
    assert [relative(path) for path in CORE.rglob("*.py") if path.stem in RETIRED] == []


@functools.cache
def classes() -> dict[str, list[str]]:
    """Each class of the packages, the original's names apart, with where it is."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        if "/agl/" in path.as_posix():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(relative(path))
    return found


@pytest.mark.parametrize("name", ONCE)
def test_a_name_has_one_meaning(name: str) -> None:
    assert len(classes().get(name, [])) <= 1


def test_retired_names_of_classes_stay_retired() -> None:
    assert [name for name in ("_Attempt", "Seen", "Settings") if name in classes()] == []


def test_files_of_tests_can_be_read_in_one_go() -> None:
    paths = [*ROOT.glob("tests/**/*.py"), *(CORE / "testing").rglob("*.py")]
    lengths = {relative(path): len(path.read_text().splitlines()) for path in paths}
    assert {name: lines for name, lines in lengths.items() if lines > TOO_LONG} == {}


def test_the_tests_of_core_have_its_folders() -> None:
    tested = {path.name for path in (ROOT / "tests" / "core").iterdir() if path.is_dir()}
    assert {path.name for path in FOLDERS if path.parent == CORE} - tested == set()


@pytest.mark.parametrize("script", sorted(ROOT.glob("examples/*/train.py")), ids=relative)
def test_a_training_script_is_one_page(script: Path) -> None:
    tree = ast.parse(script.read_text())
    quotes: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            quotes |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code = [
        line
        for number, line in enumerate(script.read_text().splitlines(), 1)
        if number not in quotes and line.strip() and not line.lstrip().startswith("#")
    ]
    assert len(code) <= TRAIN


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
