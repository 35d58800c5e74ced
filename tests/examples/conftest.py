"""Fixtures of the examples' tests.

An example's tests are collected only where it is installed, since some have their own environment.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW: dict[str, dict[str, Any]] = {
    "quest": {"counts": {"train": 4, "dev": 1, "test": 4}},
    "rag": {
        "worlds": {"train": 1, "dev": 1, "test": 1},
        "questions": {"train": 4, "dev": 4, "test": 4},
    },
    "sql": {"worlds": {"train": 4, "dev": 1, "test": 1}, "questions_per_world": 4},
}
"""Example → arguments of its data generator which make it faster."""

collect_ignore_glob = [
    f"test_{name}_*.py"
    for name in ("charts", "desk", "math", "quest", "rag", "router", "terminal", "textworld")
    if find_spec(f"{name}_example") is None
]


@pytest.fixture(scope="session")
def few_tasks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from an example to a data folder with few tasks, which tests must not
    change.
    """

    @cache
    def made(example: str) -> Path:
        from lightspan_examples.data import generated

        folder = tmp_path_factory.mktemp(example)
        if example in FEW:
            worlds = import_module(f"{example}_example.worlds")
            generated(folder, partial(worlds.generate, **FEW[example]), "few tasks", None)
        return folder

    return made


@pytest.fixture(scope="session")
def sql_cache(few_tasks: Callable[[str], Path]) -> Path:
    return few_tasks("sql")


@pytest.fixture(scope="session")
def script_of() -> Callable[[str], Any]:
    """Return a function from an example to its `train.py` as a module."""
    return cache(lambda name: SimpleNamespace(**runpy.run_path(str(EXAMPLES / name / "train.py"))))


@pytest.fixture
def torch_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the number of torch's threads, which `train.py` would change."""
    monkeypatch.setattr("lightspan_examples.example._one_torch_thread", lambda device: None)
