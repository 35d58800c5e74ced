"""Test the example of an algorithm, which is the shipped one: it learns and resumes."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import blocks  # type: ignore[import-not-found]

from lightspan.errors import ConfigError
from lightspan.progress import SilentReporter
from lightspan.training.folder import RunFolder
from lightspan_torch import RejectionSampling, rejection_sampling
from tests.reports.ui_numbers import check_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Make the example's modules importable, also in runner processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        yield importlib.import_module


def test_it_learns_and_goes_on_where_it_was_interrupted(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    torch.set_num_threads(1)
    train = example("train").train
    algorithm = RejectionSampling
    original = algorithm.run_step
    before: list[str] = []
    after: list[str] = []

    async def watched(self: Any, world: Any) -> Any:
        (policy,) = self.policies()
        before.append(world.engine.weight_hash(policy))
        metrics = await original(self, world)
        after.append(world.engine.weight_hash(policy))
        return metrics

    monkeypatch.setattr(algorithm, "run_step", watched)
    folder = RunFolder(tmp_path / "run")
    first = train(folder.path, 5, reporter=SilentReporter())
    assert first.steps == 5
    with pytest.raises(ConfigError, match="holds a run already"):
        train(folder.path, 8, reporter=SilentReporter())
    result = train(folder.path, 8, resume=True, reporter=SilentReporter())
    lines = [line for line in folder.metrics() if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["imitated"] > 0 and line["learner/skipped"] == 0 for line in lines)
    # the resumed run began with the very weights that the interrupted one ended with
    assert before[1:] == after[:-1]
    assert len({before[0], *after}) == 9
    gain = result.gain
    assert gain is not None
    assert gain.n == 32
    assert gain.low > 0.2, result.summary()
    asyncio.run(check_run(folder.path))


def test_the_page_has_the_files_as_they_are() -> None:
    written = {name: text for _, name, text in blocks("tutorials/own-algorithm.md") if name}
    files = {path.name: path.read_text("utf-8") for path in EXAMPLE.glob("*.py")}
    shipped = Path(rejection_sampling.__file__)
    assert written == {**files, shipped.name: shipped.read_text("utf-8")}
