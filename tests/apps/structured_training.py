"""Trains an app of `structured_apps` and looks whether it learned."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from serve_process import serving  # type: ignore[import-not-found]

import lightspan
from lightspan import LightningRL, Trainer
from lightspan.capture import wire
from lightspan.testing.controls import Permuted
from lightspan.testing.tiny import tiny_model
from lightspan.trainer import FitResult


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is to be learned, and how."""

    tasks: Sequence[dict[str, str]]
    """32 to train with, 48 held out."""
    steps: int
    tasks_per_step: int
    learning_rate: float


RED: Final = Lesson(
    [{"question": f"Which color for wall {n}?", "color": "red"} for n in range(80)], 6, 4, 1e-2
)
"""One answer to everything: soon learned, and found by drifting too."""
_COLORS: Final = {"fire": "red", "grass": "green", "sea": "blue", "snow": "white"}
WORDS: Final = Lesson(
    [
        {"question": f"Paint {word}.", "color": color, "number": str(number)}
        for number, (word, color) in product(range(20), _COLORS.items())
    ],
    *(16, 8, 3e-3),
)
"""One answer to everything is right for a quarter: drifting earns nothing."""
_T_95: Final = 4.303
"""Student's t for the 95 % interval of a mean over three seeds."""


def train(
    app: Any, folder: Path, lesson: Lesson, kind: type[LightningRL] = LightningRL, seed: int = 0
) -> FitResult:
    """A few steps with a tiny model."""
    model = tiny_model(folder / "start", seed=3, context=1024)
    algorithm = kind(
        str(model),
        optimize="painter",
        group_size=8,
        tasks_per_step=lesson.tasks_per_step,
        learning_rate=lesson.learning_rate,
        seed=seed,
    )
    trainer = Trainer(algorithm, steps=lesson.steps, folder=folder / "run")
    return trainer.fit(app, lesson.tasks[:32], lesson.tasks[32:])


def app_named(name: str) -> Any:
    """An app of `structured_apps`."""
    import structured_apps  # type: ignore[import-not-found]

    return getattr(structured_apps, name)


def check_it_learns(name: str, folder: Path, lesson: Lesson = RED) -> None:
    """The app of that name, each call of which is structured, gains beyond noise; none of its calls
    was refused or rejected. Then it works with what is served."""
    app = app_named(name)
    result = train(app, folder, lesson)
    assert result.gain is not None
    assert result.gain.n >= 40
    assert result.gain.low > 0
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if step["kind"] == "train"]
    assert len(steps) == lesson.steps
    for step in steps:
        assert {key for key in step if key.startswith("calls/")} == {"calls/trained"}
        assert step["calls/trained"] == step["calls"] == 8 * lesson.tasks_per_step
    check_served(app, folder / "run", lesson.tasks[:8])


def check_served(app: Any, run: Path, tasks: Sequence[dict[str, str]]) -> None:
    """The app reads a color from what `lightspan serve` answers to every task."""
    with serving(run, "--port=0") as (url, lines), lightspan.connect(url):
        try:
            rewards = asyncio.run(_ask(app, tasks))
        finally:
            wire.uninstall()
            wire.close()
    assert len(rewards) == len(tasks)
    assert lines[-1] == f"calls answered: painter {len(tasks)} (policy)"


async def _ask(app: Any, tasks: Sequence[dict[str, str]]) -> list[float]:
    """One loop for all: clients are bound to theirs."""
    rewards = []
    for task in tasks:
        value = app(task) if app.is_async else asyncio.to_thread(app, task)
        rewards.append(await value)
    await wire.aclose()
    return rewards


def check_control(name: str, folder: Path) -> None:
    """The app of that name learns; with permuted rewards it does not, over three seeds."""
    check_it_learns(name, folder / "rewards", WORDS)
    gains = []
    for seed in range(3):
        result = train(app_named(name), folder / f"permuted{seed}", WORDS, Permuted, seed)
        assert result.gain is not None
        gains.append(result.gain.mean)
    print(f"{name}, rewards permuted: gains {gains}")
    half = _T_95 * statistics.stdev(gains) / math.sqrt(len(gains))
    assert statistics.fmean(gains) - half <= 0
