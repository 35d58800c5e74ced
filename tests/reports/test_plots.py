"""Test that the learning curve is drawn from the metrics of any run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from lightspan_tools.plots import learning_curve


def _eval(step: int, mean: float | None, n: int = 500) -> dict[str, Any]:
    low = None if mean is None else mean - 0.04
    high = None if mean is None else mean + 0.04
    return {"kind": "eval", "step": step, "mean": mean, "low": low, "high": high, "n": n}


def _train(step: int, reward: float, rewriter: float) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "reward": reward,
        "agent/write/reward": reward,
        "agent/rewrite/reward": rewriter,
    }


RUN = [_eval(0, 0.35), _train(1, 0.4, 0.2), _train(2, 0.5, 0.3), _eval(2, 0.61)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list of the figures that are saved."""
    figures: list[Figure] = []
    original = Figure.savefig

    def savefig(self: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_picture_shows_held_out_training_and_agents(drawn: list[Figure], tmp_path: Path) -> None:
    learning_curve(RUN, tmp_path / "c.png", title="sql: lightning_rl", metric="accuracy")
    [figure] = drawn
    [axes] = figure.axes
    assert axes.get_title() == "sql: lightning_rl\nheld-out accuracy 0.35 → 0.61"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training step", "accuracy")
    [legend] = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == [
        "held out, with 95% interval (n=500)",
        "training",
        "training, where rewrite acts",
    ]
    assert [text.get_text() for text in axes.texts] == ["0.35", "0.61"]
    curves = {tuple(np.asarray(line.get_ydata()).tolist()) for line in axes.lines}
    assert {(0.4, 0.5), (0.2, 0.3), (0.35, 0.61)} <= curves
    assert imread(tmp_path / "c.png").shape[:2] == (650, 1040)


def test_kept_weights_stand_at_their_step(drawn: list[Figure], tmp_path: Path) -> None:
    """Check an evaluation after step 6 of the weights of step 2, which the selection chose."""
    compared = [{**_eval(step, mean), "kind": "selection"} for step, mean in ((0, 0.3), (2, 0.7))]
    kept = {**_eval(6, 0.6), "weights": 2}
    learning_curve([_eval(0, 0.35), *compared, kept], tmp_path / "c.png", title="run")
    curves = [np.asarray(line.get_xydata()).tolist() for line in drawn[0].axes[0].lines]
    assert [[0, 0.3], [2, 0.7]] in curves
    assert [[0, 0.35], [2, 0.6]] in curves


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [_eval(0, None)],
        [{"kind": "train", "step": 1, "rollouts": 8}],
        [_eval(0, None), _train(1, 0.5, 0.25), _eval(1, 0.25)],
    ],
)
def test_little_is_enough(metrics: Sequence[dict[str, Any]], tmp_path: Path) -> None:
    learning_curve(metrics, tmp_path / "c.png", title="run")
    assert (tmp_path / "c.png").stat().st_size > 1000
