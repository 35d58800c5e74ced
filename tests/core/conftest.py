"""What tests of training share: a tiny model, small apps, and trainers for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

APPS = Path(__file__).parents[1] / "apps"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    import torch

    from lightspan.testing.tiny import tiny_model

    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def apps() -> Any:
    """The module `toy_apps`, importable in runner processes too."""
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("toy_apps")


@pytest.fixture
def lines() -> Any:
    """A reporter that keeps its lines."""
    return Lines()


class Lines:
    """A reporter that keeps what stays on the screen."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def start(self, title: str, total: int) -> None: ...

    def advance(self, count: int = 1, **values: float | str) -> None: ...

    def finish(self, summary: str = "") -> None:
        if summary:
            self.texts.append(summary)

    def line(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def rl(tiny: Path) -> Callable[..., Any]:
    """LightningRL on the tiny model; small batches unless told otherwise."""
    from lightspan import LightningRL

    def make(**options: Any) -> LightningRL:
        small = {"group_size": 4, "tasks_per_step": 2, "learning_rate": 1e-3}
        return LightningRL(tiny, **{"optimize": "writer", **small, **options})

    return make


def questions(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Tasks that differ."""
    return [{"q": f"question {number}", **fields} for number in range(count)]


@pytest.fixture
def ask() -> Callable[..., list[dict[str, Any]]]:
    """`questions`, for tests (a conftest cannot be imported)."""
    return questions
