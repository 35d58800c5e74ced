"""Test that packages export what `__all__` lists."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    path.name: path
    for path in sorted(ROOT.glob("packages/*/src/*"))
    if (path / "__init__.py").is_file()
}


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path, package): path
    for package in SOURCES.values()
    for path in sorted(package.rglob("*.py"))
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_and_have_what_all_names(module: str) -> None:
    """Check that a module's `__all__` has no duplicates, and that all of its names can be
    imported.
    """
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}")
    names = getattr(loaded, "__all__", [])
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(loaded, name) is not None


@pytest.mark.parametrize("package", SOURCES)
def test_all_is_what_a_package_offers(package: str) -> None:
    """Check that a package's `__all__` equals its public names; submodules do not count."""
    try:
        loaded = importlib.import_module(package)
    except ModuleNotFoundError as error:  # a framework that excludes the others
        pytest.skip(f"needs {error.name}")
    for name in loaded.__all__:
        getattr(loaded, name)  # those imported on first use too
    offered = {
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_")
        and str(getattr(value, "__module__", "")).partition(".")[0] == package
    }
    assert offered <= set(loaded.__all__)
    assert set(loaded.__all__) <= set(dir(loaded))
