"""Check the layout that CONTRIBUTING and pyproject.toml describe."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import noxfile

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("adapter", noxfile.ADAPTERS)
def test_an_adapter_is_checked_like_the_others(adapter: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    package = f"lightspan_{adapter}"
    contracts = {each["id"]: each for each in project["importlinter"]["contracts"]}
    assert package in project["ruff"]["lint"]["isort"]["known-first-party"]
    assert f"packages/{adapter}/src" in project["mypy"]["mypy_path"].split(":")
    assert package in project["importlinter"]["root_packages"]
    assert package in contracts["capture"]["source_modules"]
