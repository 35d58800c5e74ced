"""What `benchmarks/learning.py` keeps, says and draws; the learning itself is what it measures."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lightspan.training.statistics import Interval, clustered_interval, paired_gain
from lightspan_examples.recipe import Imitation
from lightspan_examples.warm_start import make_sft

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def learning() -> Any:
    sys.path.insert(0, str(FOLDER))
    import learning

    sys.path.remove(str(FOLDER))
    return learning


@pytest.fixture(scope="module")
def curves(learning: Any) -> Any:
    return sys.modules["_curves"]


def test_the_interval_over_seeds(curves: Any) -> None:
    found = curves.seed_interval([1.0, 2.0, 3.0])
    half = 4.303 / math.sqrt(3)
    assert (found.mean, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - half)
    assert found.high == pytest.approx(2 + half)
    assert curves.seed_interval([0.5]) == type(found)(0.5, -math.inf, math.inf, 1)
    five = curves.seed_interval([0.1, 0.2, 0.3, 0.4, 0.5])
    assert five.high - five.mean == pytest.approx(2.776 * math.sqrt(0.025 / 5))


def test_an_interval_over_seeds_and_clusters(curves: Any) -> None:
    """Two seeds, one task: drawn are means of 0, .5 and 1, the outer ones a quarter each."""
    assert curves.crossed_interval([{"t": 0.0}, {"t": 1.0}], {}) == Interval(0.5, 0.0, 1.0, 2, 1)
    assert curves.crossed_interval([{"t": 1.0}, {"t": 1.0}], {}) == Interval(1.0, 1.0, 1.0, 2, 1)


def test_what_is_hard_for_all_seeds_does_not_average_out(curves: Any) -> None:
    """Equal seeds tell no more than one of them: of two solved and two unsolved clusters none is
    drawn solved in a sixteenth of all draws, however many seeds there are."""
    rewards = {f"{cluster} {n}": float(cluster in "ab") for cluster in "abcd" for n in range(3)}
    clusters = {task: task[0] for task in rewards}
    one = curves.crossed_interval([rewards], clusters)
    assert one == clustered_interval(rewards, clusters) == Interval(0.5, 0.0, 1.0, 12, 4)
    five = curves.crossed_interval([rewards] * 5, clusters)
    assert (five.low, five.high, five.n, five.clusters) == (0.0, 1.0, 60, 4)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=20), st.integers(1, 5))
def test_of_one_seed_it_is_the_cluster_bootstrap(
    curves: Any, values: list[float], count: int
) -> None:
    tasks = {f"t{n:02}": value for n, value in enumerate(values)}
    clusters = {task: f"c{n % count}" for n, task in enumerate(tasks)}
    found = curves.crossed_interval([tasks], clusters)
    expected = paired_gain(dict.fromkeys(tasks, 0.0), tasks, clusters)
    assert (found.n, found.clusters) == (expected.n, expected.clusters)
    assert found.mean == pytest.approx(expected.mean)
    if expected.clusters and expected.clusters > 1:
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("cpu_s", "warm_s", "updates", "expected"),
    [(45.0, 150.0, 1000, 300), (150.0, 150.0, 500, 500), (1.0, 150.0, 1000, 60)],
)
def test_further_imitation_has_the_updates_that_fit(
    learning: Any, cpu_s: float, warm_s: float, updates: int, expected: int
) -> None:
    assert learning.updates_within(cpu_s, warm_s, updates) == expected


@pytest.mark.parametrize(("updates", "steps", "epochs"), [(None, 1000, 1.0), (300, 300, 0.3)])
def test_further_imitation_is_annealed(
    tmp_path: Path, updates: int | None, steps: int, epochs: float
) -> None:
    """Its rate falls over just the updates that it has, as in the warm start."""
    sft = make_sft(tmp_path, 0, Imitation(demonstrations=16_000, batch=16), updates=updates)
    assert sft.optimizer is not None
    assert (sft.optimizer.decay_steps, sft.epochs) == (steps, epochs)


def test_seeds_are_compared_step_by_step(curves: Any) -> None:
    arm = curves.Arm("RL", [[(0, 0.5), (5, 0.7)], [(0, 0.6), (5, 0.9)]])
    assert [(step, found.mean) for step, found in curves.steps_of(arm)] == [(0, 0.55), (5, 0.8)]
    with pytest.raises(ValueError, match="RL: the seeds were evaluated at different steps"):
        curves.steps_of(curves.Arm("RL", [[(0, 0.5)], [(1, 0.5)]]))


@pytest.mark.parametrize("seeds", [1, 5])
def test_the_picture_is_small(curves: Any, tmp_path: Path, seeds: int) -> None:
    arms = [
        curves.Arm(
            name,
            [[(s, 0.5 + s / 50 + seed / 40) for s in range(0, 21, 5)] for seed in range(seeds)],
        )
        for name in ("terminal", "discounted", "air")
    ]
    path = tmp_path / "new" / "curve.png"
    curves.draw(arms, path, title="SQL", metric="execution accuracy")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < 150_000


def test_figures_are_measured_once(learning: Any, tmp_path: Path) -> None:
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
    assert [file.name for file in tmp_path.iterdir()] == ["figures.json"]
    assert learning.Kept(None, settings).get("RL, seed 0", measure) == [0.5]
    assert len(calls) == 3


def test_an_interrupted_run_is_measured_again(learning: Any, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"

    def interrupted() -> None:
        raise KeyboardInterrupt

    kept = learning.Kept(path, {})
    kept.get("RL, seed 0", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        kept.get("RL, seed 1", interrupted)
    kept = learning.Kept(path, {})
    assert kept.get("RL, seed 0", interrupted) == 1
    assert kept.get("RL, seed 1", lambda: 2) == 2


def test_figures_of_other_settings_are_not_mixed(learning: Any, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    learning.Kept(path, {"steps": 20, "held_out": 500}).get("RL", lambda: 1)
    with pytest.raises(SystemExit, match=r"holds figures with another held_out, split: name"):
        learning.Kept(path, {"steps": 20, "held_out": 8, "split": "dev"})
    path.write_text("[1]")
    with pytest.raises(SystemExit, match="holds no figures of this script"):
        learning.Kept(path, {})


def run_of(learning: Any, name: str = "RL", seed: int = 0, **changes: Any) -> Any:
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


def test_a_run_survives_json(learning: Any) -> None:
    run = run_of(learning, first_try=None, training={"reward": 0.7})
    run = replace(run, before={"a": 0.0, "b": 1.0}, after={"b": 1.0, "c": 0.5}, clusters={"a": "x"})
    assert (run.start, run.end, run.gains) == (0.5, 0.75, {"b": 0.0})
    run = replace(run, before={}, after={})
    again = learning.Run.of(json.loads(json.dumps(vars(run))))
    assert again == run
    assert (again.start, again.middle, again.end, again.cpu_s) == (0.5, 0.75, 0.9, 35.0)


def test_what_is_missed_is_said(learning: Any) -> None:
    subject = learning.subject_of("sql")
    kept = learning.Report("sql", subject, runs=[run_of(learning)])
    assert list(kept.missed()) == []
    report = learning.Report(
        "sql",
        subject,
        runs=[
            run_of(learning, points=[(0, 0.3), (20, 0.65)]),
            run_of(learning, seed=1, engine_cpu_s=41.0, frozen_unchanged=False),
        ],
        controls=[
            run_of(learning, "rewards permuted", points=[(0, 0.5), (20, 0.65)]),
            run_of(learning, "rewards permuted", seed=1, points=[(0, 0.5), (20, 0.55)]),
            run_of(learning, "rewriter alone", first_try=[0.5, 0.6]),
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
    drifts = [
        run_of(learning, "rewards permuted", seed=seed, points=[(0, 0.5), (20, 0.55 + seed / 200)])
        for seed in range(3)
    ]
    assert list(learning.Report("sql", subject, controls=drifts).missed()) == [
        "permuted rewards gained 0.055 over seeds, 0.043 or more"
    ]
    gains = replace(subject, start=0.0, end=0.0, gain=0.45)
    assert list(learning.Report("rag", gains, runs=[run_of(learning)]).missed()) == [
        "RL, seed 0: gained 0.400, promised 0.45"
    ]


def test_swapping_policies_must_hurt(learning: Any) -> None:
    """By more than two samples of 500 differ: 1.96 times the root of 2/4/500 is 0.062."""
    runs = [
        run_of(learning, "separate", seed=seed, swapped=[0.9, crossed])
        for seed, crossed in enumerate((0.83, 0.84, 0.95))
    ]
    report = learning.Report("router", learning.subject_of("router"), compared={"separate": runs})
    assert list(report.missed()) == [
        "separate, seed 1: swapped 0.840, own 0.900",
        "separate, seed 2: swapped 0.950, own 0.900",
    ]
    assert (
        "separate, seed 0: each policy behind its own agent 0.900, swapped 0.830" in report.text()
    )


def test_one_answer_to_every_message(learning: Any, tmp_path: Path) -> None:
    train = [{"department": "billing", "product": "kettle"}]
    test = [
        {"department": "billing", "product": "quilt"},
        {"department": "returns", "product": "quilt"},
        {"department": "returns", "product": "easel"},
        {"department": "returns", "product": "easel"},
    ]
    assert learning.constant_ticket(train, test, tmp_path) == {
        "billing, kettle": 1 / 8,
        "billing, quilt": 3 / 8,
        "billing, easel": 3 / 8,
        "returns, kettle": 3 / 8,
        "returns, quilt": 5 / 8,
        "returns, easel": 5 / 8,
    }


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ([0.94, 0.95, 0.96], "+0.050 (+0.025..+0.075, 3 paired seeds): better"),
        ([0.84, 0.85, 0.86], "-0.050 (-0.075..-0.025, 3 paired seeds): worse"),
        ([0.80, 0.90, 1.0], "no difference that can be told from chance"),
    ],
)
def test_whether_air_helps(learning: Any, ends: list[float], verdict: str) -> None:
    plain = [run_of(learning, seed=seed) for seed in range(3)]
    shaped = [
        run_of(learning, "air", seed, points=[(0, 0.5), (10, 0.75), (20, end)])
        for seed, end in enumerate(ends)
    ]
    compared = {"terminal": plain, "air": shaped}
    report = learning.Report("sql", learning.subject_of("sql"), compared=compared)
    assert verdict in report.text()
    assert [arm.name for arm in report.arms] == ["terminal", "air"]


def test_gains_over_seeds_say_how_seeds_and_tasks_vary(learning: Any) -> None:
    """Two seeds that gained .5 and 1 on each of two clusters."""
    runs = [
        run_of(
            learning,
            seed=seed,
            before={"a": 0.0, "b": 0.0},
            after={"a": gain, "b": gain},
            clusters={"a": "x", "b": "y"},
            odd={"unscored after": 2, "failed after": 0},
        )
        for seed, gain in enumerate((0.5, 1.0))
    ]
    text = learning.Report("sql", learning.subject_of("sql"), runs=runs).text()
    half = 12.706 * 0.25
    assert (
        f"RL: gain over 2 seeds +0.750 ({0.75 - half:+.3f}..{0.75 + half:+.3f} by Student's t over "
        "seeds; with tasks drawn too +0.500..+1.000, 2 seeds x 2 clusters)"
    ) in text
    assert "RL, seed 0: 2 unscored after\n" in text


def test_every_example_has_its_parts(learning: Any) -> None:
    parts = {name: learning.subject_of(name).parts for name in learning.SUBJECTS}
    assert parts == {
        "sql": ["rl", "permuted", "rewriter", "sft", "constant", "air"],
        "rag": ["rl", "permuted", "sft", "constant"],
        "rag-crewai": ["rl", "permuted", "sft", "constant", "agents"],
        "math": ["rl", "permuted", "sft", "constant"],
        "router": ["rl", "permuted", "constant", "policies"],
        "router-pydantic-ai": ["rl", "permuted", "constant"],
        "quest": ["rl", "permuted", "sft", "constant"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--example", "rag", "--parts", "air"], "rag has no part air: rl, permuted, sft, const"),
        (["--parts", "air", "--arms", "x"], "sql has no arm x: terminal, discounted, air"),
    ],
)
def test_what_an_example_lacks(
    learning: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["learning.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        learning.main()
    assert message in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_parts_of_an_untaught_model(learning: Any, tmp_path: Path, sql_cache: Path) -> None:
    """Every part runs, on a model whose warm start was cut to nothing; then all is kept."""
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


@pytest.mark.long
@pytest.mark.timeout(900)
def test_policies_are_compared_and_swapped(
    learning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every arm of the router runs, on a small untrained model in place of the published one."""
    from lightspan_examples.small_model import build_model
    from router_example import recipes, training

    say = [{"messages": [{"role": "user", "content": task["message"]}]} for task in _messages()]
    build_model(tmp_path / "model", say, vocabulary=512)
    monkeypatch.setattr(recipes, "pretrained", lambda cache, reporter: tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    bench = learning.Bench(
        "router",
        tmp_path / "cache",
        tmp_path / "scratch",
        held_out=4,
        recipe=replace(training.RECIPE, steps=1, tasks_per_step=2, group_size=2),
        split="dev",
    )
    report = bench.report(["policies", "constant"], [0])
    [shared], [separate] = report.compared["shared"], report.compared["separate"]
    assert shared.swapped is None
    assert separate.swapped is not None
    assert all(0 <= score <= 1 for score in separate.swapped)
    assert "separate, seed 0: each policy behind its own agent" in report.text()
    assert report.constant["answers"] == 4 * (40 + 4)


def _messages() -> list[Any]:
    from router_example.messages import tasks

    return tasks("train")[:200]
