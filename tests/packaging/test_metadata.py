"""Test the metadata of the packages: in the sources, and in wheels if LIGHTSPAN_DIST is set."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import folders_of

ROOT = Path(__file__).parents[2]
PACKAGES = {path.name: path for path in sorted((ROOT / "packages").iterdir()) if path.is_dir()}
PLUGINS = {name: path for name, path in PACKAGES.items() if name != "core"}
ADAPTERS = {
    name: path
    for name, path in PLUGINS.items()
    if (path / f"src/lightspan_{name}/_hook.py").is_file()
}
EXAMPLES = {path.parent.name: path.parent for path in ROOT.glob("examples/*/pyproject.toml")}

CORE_NEEDS = {"msgspec", "opentelemetry-api", "opentelemetry-sdk"}
"""Distributions that core needs in an app's environment."""


VERSION_FILE = PACKAGES["core"] / "src/lightspan/__init__.py"
[VERSION] = re.findall('^__version__ = "(.*)"$', VERSION_FILE.read_text(), re.MULTILINE)


def metadata_of(path: Path) -> dict[str, Any]:
    return tomllib.loads((path / "pyproject.toml").read_text())


def project(path: Path) -> dict[str, Any]:
    declared: dict[str, Any] = metadata_of(path)["project"]
    return declared


FOLDERS = {project(path)["name"]: path for path in PACKAGES.values()}
"""Distribution → folder of its sources."""


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match.group().lower()


def requirements(path: Path) -> list[str]:
    declared = project(path)
    extras = declared.get("optional-dependencies", {}).values()
    return [*declared["dependencies"], *(each for extra in extras for each in extra)]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_version_is_read_from_one_file(package: str) -> None:
    declared = metadata_of(PACKAGES[package])
    assert declared["project"]["dynamic"] == ["version"]
    path = PACKAGES[package] / declared["tool"]["hatch"]["version"]["path"]
    assert path.resolve() == VERSION_FILE


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugins_need_this_core(plugin: str) -> None:
    major, minor = VERSION.split(".")[:2]
    ours = [each for each in requirements(PLUGINS[plugin]) if each.startswith("lightspan")]
    assert "lightspan" in map(name_of, project(PLUGINS[plugin])["dependencies"])
    for each in ours:
        assert re.fullmatch(rf"lightspan[a-z-]*(\[\w+\])?~={major}\.{minor}\.0", each)


@pytest.mark.parametrize("extra", project(PACKAGES["core"])["optional-dependencies"])
def test_extras_are_the_packages_that_errors_name(extra: str) -> None:
    """Check that `how_to_install` names every folder that pip needs for an extra."""
    needed = {name_of(each) for each in project(PACKAGES["core"])["optional-dependencies"][extra]}
    assert {FOLDERS[name].name for name in needed} == set(folders_of(extra))
    for name in needed:  # nothing else of ours that pip would look for on an index
        beside = {name_of(each) for each in project(FOLDERS[name])["dependencies"]}
        assert {each for each in beside if each.startswith("lightspan-")} <= needed


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_name_the_modules_of_their_frameworks(adapter: str) -> None:
    """Check the entry points by which other adapters recognise code that may create agents."""
    declared = project(ADAPTERS[adapter])
    modules = declared["entry-points"]["lightspan.frameworks"]
    assert set(modules.values()) == {f"lightspan_{adapter}"}
    static = (ADAPTERS[adapter] / f"src/lightspan_{adapter}/_static.py").read_text()
    assert all(f'"{module}"' in static for module in modules), "no framework is its own sibling"


@pytest.mark.parametrize("path", [*PACKAGES.values(), *EXAMPLES.values()], ids=lambda p: p.name)
def test_torch_is_never_pinned(path: Path) -> None:
    """Check that no metadata pins torch, which would choose between CUDA, ROCm and the CPU."""
    for each in requirements(path):
        if name_of(each) == "torch":
            assert re.fullmatch(r"torch(>=[\d.]+)?", each)


def test_core_asks_little_of_an_app() -> None:
    assert {name_of(each) for each in project(PACKAGES["core"])["dependencies"]} == CORE_NEEDS


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_is_checked_like_the_others(adapter: str) -> None:
    """Check the layout that CONTRIBUTING and pyproject.toml describe."""
    tool = metadata_of(ROOT)["tool"]
    package = f"lightspan_{adapter}"
    contracts = {each["id"]: each for each in tool["importlinter"]["contracts"]}
    assert package in tool["ruff"]["lint"]["isort"]["known-first-party"]
    assert f"packages/{adapter}/src" in tool["mypy"]["mypy_path"].split(":")
    assert package in tool["importlinter"]["root_packages"]
    assert package in contracts["capture"]["source_modules"]
    assert package in contracts["adapters"]["source_modules"]


# --- constraints ----------------------------------------------------------------------------
def pins(name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (ROOT / "constraints" / name).read_text().splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement:
            pinned, _, version = requirement.partition("==")
            assert version, f"{name}: {requirement} is not pinned"
            found[pinned.lower()] = version
    return found


def test_the_script_wrote_the_constraints() -> None:
    command = [sys.executable, str(ROOT / "constraints/update.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_core_constraints_cover_what_core_declares() -> None:
    """Check the constraints, which leave out what the oldest Python cannot install."""
    ours = PACKAGES.keys() - ADAPTERS.keys() - {"testing"}
    declared = {
        name_of(each)
        for name in ours
        for each in requirements(PACKAGES[name])
        if "python_version >=" not in each
    }
    assert set(pins("core-latest.txt")) == {
        each for each in declared if not each.startswith("lightspan")
    }


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_oldest_constraints_are_the_floors(adapter: str) -> None:
    """Check that CI's oldest versions are the minimum versions of the metadata."""
    oldest = pins(f"{adapter}-oldest.txt")
    for each in project(ADAPTERS[adapter])["dependencies"]:
        if name_of(each) in oldest:
            floor = each.partition(">=")[2].partition(",")[0]
            assert oldest[name_of(each)] == floor, f"{each} against {oldest[name_of(each)]}"


# --- built packages -------------------------------------------------------------------------
DIST = os.environ.get("LIGHTSPAN_DIST")
built = pytest.mark.skipif(DIST is None, reason="nox -s packaging builds the wheels")


CACHE = re.compile(r"__pycache__/|(^|/)\.")
"""Files that tools leave in a folder of sources."""


def wheel(package: str) -> zipfile.ZipFile:
    name = project(PACKAGES[package])["name"].replace("-", "_")
    (path,) = Path(DIST or "").glob(f"{name}-[0-9]*.whl")
    return zipfile.ZipFile(path)


@built
@pytest.mark.parametrize("package", PACKAGES)
def test_wheels_hold_the_whole_source_and_nothing_else(package: str) -> None:
    source = PACKAGES[package] / "src"
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    ours = {str(path) for path in files if not CACHE.search(str(path))}
    held = {each for each in wheel(package).namelist() if ".dist-info/" not in each}
    assert held == ours
    assert any(each.endswith("/py.typed") for each in held)
    assert any(each.endswith(".sql") for each in held) is (package in ("cluster", "core"))
    names = [each for each in wheel(package).namelist() if ".dist-info/" in each]
    [license_name] = [each for each in names if each.endswith("/LICENSE")]
    assert wheel(package).read(license_name) == (ROOT / "LICENSE").read_bytes()


@built
def test_the_web_page_is_small() -> None:
    assert Path(wheel("ui").filename or "").stat().st_size <= 300_000


@built
@pytest.mark.parametrize("package", PACKAGES)
def test_source_distributions_hold_the_package_and_nothing_else(package: str) -> None:
    name = project(PACKAGES[package])["name"].replace("-", "_")
    [path] = Path(DIST or "").glob(f"{name}-[0-9]*.tar.gz")
    with tarfile.open(path) as archive:
        held = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    files = [each for each in (PACKAGES[package] / "src").rglob("*") if each.is_file()]
    ours = {str(each.relative_to(PACKAGES[package])) for each in files}
    beside = {"PKG-INFO", "pyproject.toml", "README.md", "LICENSE"}
    assert held - {".gitignore"} == {each for each in ours if not CACHE.search(each)} | beside
