"""Fixtures of tests of training: a tiny model, small apps, and trainers for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.forked import is_forked

APPS = Path(__file__).parent / "apps"
PAINTED = {"test_learning_benchmark", "test_plots", "test_trainer"}
"""Test files about learning curves, in which the curves are painted."""


@pytest.fixture(scope="module", autouse=True)
def curves_are_not_painted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace the painting of learning curves, which takes as long as a step of the tiny model.

    The curves' data are still computed.
    """
    if not is_forked(request.path) or request.path.stem in PAINTED:
        yield
        return
    from matplotlib.figure import Figure

    with patch.object(Figure, "savefig", _save_unpainted):
        yield


def _save_unpainted(figure: Any, path: Path) -> None:
    path.write_bytes(b"")


@pytest.fixture(scope="session")
def apps() -> Any:
    """Return the module `toy_apps`; runner processes can import it too."""
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("toy_apps")


@pytest.fixture(scope="session")
def dry_apps() -> Any:
    """Return the module `dry_apps`; runner processes can import it too."""
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("dry_apps")


@pytest.fixture(scope="session")
def one_step(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Train one step in two minibatches; return the run's folder and the learner's rows.

    A rollout has two calls of the writer and one of a frozen checker. Tests must not change the
    run.
    """
    from lightspan import LightningRL, Trainer
    from lightspan.progress import SilentReporter
    from lightspan.protocols.learner import Optimizer
    from lightspan_torch.learner.torch import TorchLearner

    rows: list[Any] = []

    class Recording(TorchLearner):
        def update(self, given: Any, *args: Any, **more: Any) -> dict[str, float]:
            rows.extend(given)
            return super().update(given, *args, **more)

    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    app = importlib.import_module("inspected_app")
    tasks = [{"question": f"say {number}"} for number in range(3)]
    for seed in range(8):  # what is sampled depends on the batching, so a step may teach nothing
        algorithm = LightningRL(
            tiny,
            optimize="writer",
            frozen="base",
            group_size=4,
            tasks_per_step=3,
            minibatches=2,
            seed=seed,
        )
        learner = Recording({"policy": tiny}, optimizer=Optimizer(learning_rate=1e-3), seed=0)
        folder = tmp_path_factory.mktemp("one-step") / "run"
        trainer = Trainer(
            algorithm, steps=1, folder=folder, learner=learner, reporter=SilentReporter()
        )
        trainer.fit(app.answer, tasks, [{"question": "held out"}])
        if rows:
            break
    return folder, rows


@pytest.fixture
def lines() -> Any:
    """Return a reporter that stores its lines."""
    return Lines()


class Lines:
    """A reporter that stores the lines that stay on the screen."""

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
    """Return a function that makes LightningRL for the tiny model, by default with small
    batches.
    """
    from lightspan import LightningRL

    def make(**options: Any) -> LightningRL:
        small = {"group_size": 4, "tasks_per_step": 2, "learning_rate": 1e-3}
        return LightningRL(tiny, **{"optimize": "writer", **small, **options})

    return make


def questions(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return `count` tasks that differ."""
    return [{"q": f"question {number}", **fields} for number in range(count)]


@pytest.fixture
def ask() -> Callable[..., list[dict[str, Any]]]:
    """Return `questions`, because tests cannot import a conftest."""
    return questions
