"""Train an app of `structured_apps`, and check that it learns."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from serve_process import serving  # type: ignore[import-not-found]

import lightspan
from lightspan import LightningRL, Trainer
from lightspan.capture import sdk_instrumentation
from lightspan.trainer import FitResult
from lightspan_testing.permuted_rewards import Permuted
from lightspan_testing.tiny import tiny_model

_COLORS: Final = ("red", "green", "blue", "white")
_STEPS: Final = 6
_TASKS_PER_STEP: Final = 4
_SEEDS: Final = range(5)
_T_998: Final = 7.173
"""Student's t for the 99.8 % confidence interval of a mean over five seeds.

With a dozen apps that learn nothing, one seems to learn by chance in one measurement of eighty.
"""


def tasks_of(seed: int) -> list[dict[str, str]]:
    """Return 80 tasks, 32 to train with and 48 held out, with the same right answer.

    The answer depends on the seed. Without informative rewards, a policy drifts to one answer, most
    often to its most frequent one; so it does not reach the right answer by chance with every seed.
    """
    color = _COLORS[seed % len(_COLORS)]
    return [{"question": f"Which color for wall {n}?", "color": color} for n in range(80)]


def train(
    app: Any, folder: Path, kind: type[LightningRL] = LightningRL, seed: int = 0
) -> FitResult:
    """Train a tiny model for a few steps."""
    model = tiny_model(folder / "start", seed=3, context=1024)
    algorithm = kind(
        str(model),
        optimize="painter",
        group_size=8,
        tasks_per_step=_TASKS_PER_STEP,
        learning_rate=1e-2,
        seed=seed,
    )
    trainer, tasks = Trainer(algorithm, steps=_STEPS, folder=folder / "run"), tasks_of(seed)
    return trainer.fit(app, tasks[:32], tasks[32:])


def app_named(name: str) -> Any:
    """Return an app of `structured_apps`."""
    import structured_apps  # type: ignore[import-not-found]

    return getattr(structured_apps, name)


def check_it_learns(name: str, folder: Path) -> None:
    """Check that the app `name` gains more than noise, and that all of its calls are trained.

    Then check it with the served result.
    """
    app = app_named(name)
    result = train(app, folder)
    assert result.gain is not None
    assert result.gain.n >= 40
    assert result.gain.low > 0
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if step["kind"] == "train"]
    assert len(steps) == _STEPS
    for step in steps:
        assert {key for key in step if key.startswith("calls/")} == {"calls/trained"}
        assert step["calls/trained"] == step["calls"] == 8 * _TASKS_PER_STEP
    check_served(app, folder / "run", tasks_of(0)[:8])


def check_served(app: Any, run: Path, tasks: Sequence[dict[str, str]]) -> None:
    """Check that `lightspan serve` answers every task with a color."""
    with serving(run, "--port=0") as (url, lines), lightspan.connect(url):
        try:
            rewards = asyncio.run(_ask(app, tasks))
        finally:
            sdk_instrumentation.uninstall()
            sdk_instrumentation.close()
    assert len(rewards) == len(tasks)
    assert lines[-1] == f"calls answered: painter {len(tasks)} (policy)"


async def _ask(app: Any, tasks: Sequence[dict[str, str]]) -> list[float]:
    """Run all tasks in one event loop, because clients are bound to their loop."""
    rewards = []
    for task in tasks:
        value = app(task) if app.is_async else asyncio.to_thread(app, task)
        rewards.append(await value)
    await sdk_instrumentation.aclose()
    return rewards


def check_control(name: str, folder: Path) -> None:
    """Check that the app `name` learns, and that it does not learn with permuted rewards."""
    lower: dict[str, float] = {}
    for kind in (LightningRL, Permuted):
        gains = [_gain(name, folder / f"{kind.__name__}{seed}", kind, seed) for seed in _SEEDS]
        mean = statistics.fmean(gains)
        lower[kind.__name__] = mean - _T_998 * statistics.stdev(gains) / math.sqrt(len(gains))
        print(
            f"{name}, {kind.__name__}: gains {[round(gain, 3) for gain in gains]}, mean {mean:.3f}"
        )
    assert lower["LightningRL"] > 0
    assert lower["Permuted"] <= 0


def _gain(name: str, folder: Path, kind: type[LightningRL], seed: int) -> float:
    result = train(app_named(name), folder, kind, seed)
    assert result.gain is not None
    return result.gain.mean
