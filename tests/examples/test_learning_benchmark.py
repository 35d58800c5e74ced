"""Test the results, messages and figures of `benchmarks/learning.py`.

The benchmark itself measures the learning.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import _curves
import learning
import pytest
from hypothesis import given, settings, strategies as st

from lightspan.training.statistics import Interval, paired_gain


def test_the_interval_over_seeds() -> None:
    found = _curves.seed_interval([1.0, 2.0, 3.0])
    half = 4.303 / math.sqrt(3)
    assert (found.mean, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - half)
    assert found.high == pytest.approx(2 + half)
    assert _curves.seed_interval([0.5]) == type(found)(0.5, -math.inf, math.inf, 1)
    five = _curves.seed_interval([0.1, 0.2, 0.3, 0.4, 0.5])
    assert five.high - five.mean == pytest.approx(2.776 * math.sqrt(0.025 / 5))


def test_an_interval_over_seeds_and_clusters() -> None:
    """Check two seeds and one task: the means 0 and 1 are drawn in a quarter of the cases each."""
    assert _curves.crossed_interval([{"t": 0.0}, {"t": 1.0}], {}) == Interval(0.5, 0.0, 1.0, 2, 1)
    assert _curves.crossed_interval([{"t": 1.0}, {"t": 1.0}], {}) == Interval(1.0, 1.0, 1.0, 2, 1)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20), st.integers(1, 5))
def test_of_one_seed_it_is_that_over_clusters(values: list[float], count: int) -> None:
    tasks = {f"t{n:02}": value for n, value in enumerate(values)}
    clusters = {task: f"c{n % count}" for n, task in enumerate(tasks)}
    found = _curves.crossed_interval([tasks], clusters)
    expected = paired_gain(dict.fromkeys(tasks, 0.0), tasks, clusters)
    assert (found.n, found.clusters) == (expected.n, expected.clusters)
    assert found.mean == pytest.approx(expected.mean)
    if expected.clusters and expected.clusters > 1:
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_figures_are_measured_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "figures.json", []

    def measure() -> list[float]:
        calls.append(1)
        return [0.5]

    settings = {"example": "sql", "steps": (1, 2)}
    assert learning.Kept(path, settings).get("RL, seed 0", measure) == [0.5]
    again = learning.Kept(path, settings)
    assert again.get("RL, seed 0", measure) == [0.5]
    assert len(calls) == 1
    again.get("RL, seed 1", measure)
    again.write(machine={"cores": 2})
    found = json.loads(path.read_text())
    assert sorted(found["figures"]) == ["RL, seed 0", "RL, seed 1"]
    assert found["machine"] == {"cores": 2}


def test_figures_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    learning.Kept(path, {"steps": 20, "held_out": 500}).get("RL", lambda: 1)
    with pytest.raises(SystemExit, match=r"holds figures with another held_out, split: name"):
        learning.Kept(path, {"steps": 20, "held_out": 8, "split": "dev"})
    path.write_text("[1]")
    with pytest.raises(SystemExit, match="holds no figures of this script"):
        learning.Kept(path, {})


def run_of(name: str = "RL", seed: int = 0, **changes: Any) -> Any:
    run = learning.Run(
        name=name,
        seed=seed,
        points=[(0, 0.5), (10, 0.75), (20, 0.9)],
        gain="+0.400 (+0.350..+0.450)",
        n=500,
        engine_cpu_s=30.0,
        learner_cpu_s=5.0,
        app_cpu_s=60.0,
        wall_s=140.0,
    )
    return replace(run, **changes)


def test_what_is_missed_is_said() -> None:
    subject = learning.subject_of("sql")
    assert list(learning.Report("sql", subject, runs=[run_of()]).missed()) == []
    report = learning.Report(
        "sql",
        subject,
        runs=[
            run_of(points=[(0, 0.3), (20, 0.65)]),
            run_of(seed=1, engine_cpu_s=41.0, frozen_unchanged=False),
        ],
        controls=[
            run_of("rewards permuted", points=[(0, 0.5), (20, 0.65)]),
            run_of("rewriter alone", first_try=[0.5, 0.6]),
        ],
        more_sft=[{"seed": 0, "cpu_s": 40.0, "end": 0.9, "rl": 0.9}],
        constant={"answers": 9, "best": "SELECT 1", "score": 0.06},
    )
    assert list(report.missed()) == [
        "RL, seed 0: 0.300 -> 0.650, promised from 0.35 to 0.7",
        "RL, seed 1: 46.0 CPU-seconds, promised 45",
        "RL, seed 1: the frozen agents' weights changed",
        "rewriter alone: first tries moved: 0.500 -> 0.600",
        "permuted rewards, seed 0: gained 0.150, promised below 0.25 of what rewards taught "
        "(0.350)",
        "more SFT, seed 0: 0.900, RL 0.900",
        "a constant answer scores 0.060, promised 0.05",
    ]


def test_charts_that_are_exchanged_are_not_read() -> None:
    subject = learning.subject_of("charts")
    looks, guesses = run_of(exchanged=0.145), run_of(seed=1, exchanged=0.5)
    report = learning.Report("charts", subject, runs=[looks, guesses])
    assert list(report.missed()) == ["RL, seed 1: 0.500 with other inputs, promised at most 0.25"]
    assert "RL, seed 0: with the input of another task: 0.145" in report.text().splitlines()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_parts_of_an_untaught_model(tmp_path: Path, sql_cache: Path) -> None:
    """Run every part with a model that had almost no warm start, and check the results."""
    from sql_example import training

    shutil.copytree(sql_cache, tmp_path / "cache")  # where its warm start is kept too
    imitation = replace(training.RECIPE.imitation, demonstrations=64)
    small = {"steps": 1, "tasks_per_step": 2, "group_size": 2}
    recipe = replace(training.RECIPE, **small, imitation=imitation)

    def bench(scratch: str) -> Any:
        (tmp_path / scratch).mkdir()
        return learning.Bench(
            "sql",
            tmp_path / "cache",
            tmp_path / scratch,
            held_out=4,
            recipe=recipe,
            split="dev",
            kept=tmp_path / "figures.json",
        )

    first = bench("one")
    report = first.report(first.subject.parts, [0], ["terminal", "air"])
    assert [run.name for run in report.runs] == ["RL"]
    assert [run.name for run in report.controls] == ["rewards permuted", "rewriter alone"]
    assert report.runs[0].frozen_unchanged is True
    assert [step for step, _ in report.runs[0].points] == [0, 1]
    assert report.controls[1].first_try is not None
    assert report.compared["terminal"] == report.runs
    assert "air/draft_error" in report.compared["air"][0].training
    assert report.constant is not None
    text = report.text()

    fail: Callable[..., Any] = pytest.fail
    again = bench("two")
    again._learn = again._more_sft = again.constant = fail
    assert again.report(again.subject.parts, [0], ["terminal", "air"]).text() == text
