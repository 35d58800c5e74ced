"""Test alerts for the metrics of runs, recorded ones and made-up ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan import LightningRL
from lightspan.algorithms.metrics import batch_metrics
from lightspan.training.listeners import RunEvent
from lightspan.training.results import Evaluation
from lightspan_tools.alerts import (
    Alert,
    AlertMonitor,
    few_tasks_notes,
    latest_step_fails,
    print_alerts,
    update_notes,
    validation_failures_rise,
    validation_falls,
)
from packages.core.tests.algorithms.scripted_world import episode

RECORDED = Path(__file__).parent / "histories"
"""Folder of recorded metrics of real runs; its README.md describes them."""


def line(step: int, rewards: Sequence[Sequence[float]], **more: float) -> dict[str, Any]:
    """Return a line of metrics of a training step, from the rewards of each group."""
    means = [math.fsum(group) / len(group) for group in rewards]
    mean = math.fsum(means) / len(means)
    variance = math.fsum((value - mean) ** 2 for value in means) / max(1, len(means) - 1)
    idle = [group for group in rewards if min(group) == max(group)]
    return {
        "kind": "train",
        "step": step,
        "reward": mean,
        "reward_se": math.sqrt(variance / len(means)),
        "batch/groups": len(rewards),
        "batch/groups:equal_rewards": len(idle),
        "batch/scored": sum(map(len, rewards)),
        "batch/zero_advantage_rollouts": sum(map(len, idle)),
        **more,
    }


def sampled(
    rng: random.Random, step: int, mean: float, groups: int = 16, **more: float
) -> dict[str, Any]:
    """Return a line of metrics whose tasks have success rates that differ by about 0.3.

    They differ by less where the mean is near 0.
    """
    spread = min(0.3, mean)
    chances = (min(1.0, max(0.0, rng.gauss(mean, spread))) for _ in range(groups))
    return line(
        step, [[float(rng.random() < chance) for _ in range(8)] for chance in chances], **more
    )


def read(lines: Sequence[dict[str, Any]]) -> list[Alert]:
    return AlertMonitor().read(lines, [])


def recorded(name: str) -> list[tuple[str, int]]:
    """Return (name, step) of the alerts of a recorded run."""
    lines = [json.loads(text) for text in (RECORDED / f"{name}.jsonl").read_text().splitlines()]
    evaluations = [
        Evaluation(
            step=line["step"],
            rewards={f"task {n}": reward for n, reward in enumerate(line["rewards"])},
        )
        for line in lines
        if line["kind"] == "eval"
    ]
    return [(alert.name, alert.step) for alert in AlertMonitor().read(lines, evaluations)]


LEARNED = sorted(path.stem for path in RECORDED.glob("*.jsonl") if "-seed" in path.stem[-6:])


@pytest.mark.parametrize("run", LEARNED)
def test_a_run_that_learned_has_no_alert(run: str) -> None:
    assert not recorded(run)


def test_runs_that_went_wrong() -> None:
    assert {"sql-seed0", "sql-seed1"} <= set(LEARNED)
    assert recorded("rag-crewai-seed2-permuted") == [("validation_falls", 2), ("reward_falls", 8)]
    assert recorded("sql-seed0-permuted") == [("validation_falls", 15), ("reward_falls", 20)]
    assert recorded("sql-seed1-permuted") == [("validation_falls", 10)]
    assert recorded("sql-seed0-rate-x0.001") == [("policy_stays", 10)]
    assert recorded("sql-seed1-rate-x30") == [("no_group_varies", 3), ("reward_falls", 4)]
    assert recorded("sql-seed1-collapse") == [("reward_falls", 4), ("no_group_varies", 4)]
    assert recorded("sql-seed0-rate-x30") == [
        ("no_group_varies", 3),
        ("reward_falls", 4),
        ("validation_falls", 5),
    ]


@pytest.mark.parametrize(("groups", "end"), [(16, 0.5), (4, 0.5), (16, 0.8)])
def test_a_policy_that_stays_or_learns_hardly_ever_has_an_alert(groups: int, end: float) -> None:
    alerts = 0
    for run in range(100):
        rng = random.Random(run)
        means = [0.5 + (end - 0.5) * step / 30 for step in range(30)]
        alerts += bool(read([sampled(rng, n, mean, groups) for n, mean in enumerate(means)]))
    assert alerts <= 3


def test_a_falling_reward_gives_one_alert_with_its_figures() -> None:
    rng = random.Random(0)
    levels = [0.7] * 8 + [0.2] * 8
    more = {"learner/learning_rate": 1e-4}
    [alert] = read([sampled(rng, step, level, **more) for step, level in enumerate(levels, 1)])
    assert (alert.name, alert.step) == ("reward_falls", 10)
    assert alert.text.startswith("the training reward is falling: 0.7")
    assert "Lower learning_rate (now 0.0001), or hold the policy near its start with" in alert.text


def test_the_training_reward_of_adaptive_tasks_is_not_judged() -> None:
    """Check a reward that falls because harder tasks are chosen; evaluations are judged."""
    rng = random.Random(0)
    more = {"tasks/zero_gradient_shuffled": 0.4}
    steps = [sampled(rng, step, 0.9 if step <= 8 else 0.3, **more) for step in range(1, 17)]
    monitor = AlertMonitor()
    assert not monitor.read(steps, [])
    monitor.evaluated(Evaluation(step=0, rewards={str(n): 0.9 for n in range(10)}))
    falls = {str(n): 0.1 * (n % 2) for n in range(10)}
    [alert] = monitor.evaluated(Evaluation(step=16, rewards=falls))
    assert alert.name == "validation_falls"
    for step in steps:
        del step["tasks/zero_gradient_shuffled"]
    assert [alert.name for alert in read(steps)] == ["reward_falls"]


def test_a_policy_that_hardly_moves_is_noticed_once_the_rate_has_warmed_up() -> None:
    def run(*rates: float) -> list[Alert]:
        rng = random.Random(3)
        still = [{"learner/approx_kl": 1e-9, "learner/learning_rate": rate} for rate in rates]
        return read([sampled(rng, step, 0.5, **more) for step, more in enumerate(still, 1)])

    [alert] = run(*[1e-9] * 12)
    assert (alert.name, alert.step) == ("policy_stays", 10)
    assert "Raise learning_rate (now 1e-09): tenfold at first" in alert.text
    assert not run(*(1e-9 * step for step in range(12)))


def alerts_of(
    means: Sequence[float], runs: int = 100, groups: int = 16, entropy: float = 0.92
) -> list[Alert]:
    """Return the first alert of falling rewards of each of some simulated runs that has one.

    Args:
        means: mean reward of each step.
        runs: number of runs.
        groups: groups of a step.
        entropy: factor by which the entropy falls in a step.
    """
    alerts = []
    for run in range(runs):
        rng = random.Random(run)
        lines = [
            sampled(rng, step, mean, groups, **{"learner/entropy": entropy**step})
            for step, mean in enumerate(means, 1)
        ]
        alerts += [alert for alert in read(lines) if alert.name == "reward_falls"]
    return alerts


@pytest.mark.parametrize(
    ("start", "end", "rise", "groups"),
    [(0.4, 0.75, 6, 4), (0.4, 0.7, 8, 8), (0.4, 0.7, 10, 16), (0.1, 0.4, 30, 8)],
)
def test_a_reward_that_rose_early_and_stays_has_an_alert_in_at_most_one_percent(
    start: float, end: float, rise: int, groups: int
) -> None:
    means = [start + (end - start) * min(1.0, step / rise) for step in range(100)]
    assert len(alerts_of(means, groups=groups)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("groups", [4, 16])
def test_a_reward_that_stays_as_it_is_hardly_ever_has_an_alert(groups: int) -> None:
    assert len(alerts_of([0.5] * 30, runs=400, groups=groups)) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("groups", [4, 16])
def test_rare_rewards_that_stay_have_an_alert_in_at_most_one_percent(groups: int) -> None:
    """Check tasks of which few succeed at all: their rates are of a beta distribution.

    Their mean is one, two, three and five per cent.
    """
    alerts, runs = 0, 400
    for run in range(runs):
        rng, monitor = random.Random(run), AlertMonitor()
        failures = 0.3 * (1 / (0.01, 0.02, 0.03, 0.05)[run % 4] - 1)
        for step in range(1, 301):
            rates = [rng.betavariate(0.3, failures) for _ in range(groups)]
            counts = [[float(rng.random() < rate) for _ in range(8)] for rate in rates]
            names = [alert.name for alert in monitor.step(line(step, counts))]
            alerts += names.count("reward_falls")
    assert alerts <= 0.01 * runs


def test_a_reward_that_is_lost_in_the_first_step_has_an_alert() -> None:
    """Check the training rewards of a run whose first updates moved the policy by a KL of 0.46."""
    alerts = alerts_of([0.23, 0.01, 0.02, 0.07, 0.00, 0.02])
    assert len(alerts) >= 95
    assert sum(alert.step == 4 for alert in alerts) >= 80


def test_a_reward_that_declines_slowly_has_an_alert() -> None:
    """Check the decline that rewards permuted within each group cause."""
    means = [0.24 - 0.15 * step / 40 for step in range(60)]
    assert len(alerts_of(means)) >= 85


def test_a_held_out_reward_that_falls_is_compared_on_the_tasks_that_both_scored() -> None:
    rng, monitor = random.Random(6), AlertMonitor()
    before = {f"t{n}": float(rng.random() < 0.8) for n in range(100)}
    worse = {task: float(reward and rng.random() < 0.7) for task, reward in before.items()}
    assert not monitor.evaluated(Evaluation(step=0, rewards=before))
    assert not monitor.evaluated(Evaluation(step=5, rewards={**before, "new": 0.0}))
    [alert] = monitor.evaluated(Evaluation(step=10, rewards=worse))
    assert alert.text.startswith("the held-out reward has fallen since step 0: by -0.")
    assert 'Trainer(keep="best"), fit(…, selection=…)' in alert.text


def test_a_held_out_fall_of_over_four_standard_errors_is_noticed_on_ten_tasks() -> None:
    monitor = AlertMonitor()
    monitor.evaluated(Evaluation(step=0, rewards={str(n): 0.9 for n in range(10)}))
    falls = {str(n): 0.5 + (0.279 if n % 2 else -0.279) for n in range(10)}  # 4.3 standard errors
    assert [alert.name for alert in monitor.evaluated(Evaluation(step=5, rewards=falls))] == [
        "validation_falls"
    ]


def test_an_app_that_comes_to_fail_is_noticed_in_training_and_held_out() -> None:
    def failing(shares: Sequence[float]) -> list[str]:
        rng = random.Random(9)
        lines = [
            sampled(rng, n, 0.5, rollouts=128.0, failed=round(128 * share))
            for n, share in enumerate(shares, 1)
        ]
        return [alert.text for alert in read(lines)]

    assert not failing([0.4] * 12)
    assert not failing([0.4] * 6 + [0.1] * 6)
    assert not failing([0.0] * 6 + [0.04] * 6)
    assert len(failing([0.1] * 200 + [0.7] * 6)) == 1
    assert not failing([0.1] * 30 + [0.6] * 2 + [0.1] * 30)
    [text] = failing([0.4] * 6 + [0.8] * 6)
    assert text.startswith("the app fails more often: 40 % of the rollouts in steps 1 to 3, 80 % ")

    monitor, rewards = AlertMonitor(), {f"t{n}": 0.5 for n in range(256)}
    assert not monitor.evaluated(Evaluation(step=0, rewards=rewards, failed=101))
    assert not monitor.evaluated(Evaluation(step=5, rewards=rewards, failed=110))
    [alert] = monitor.evaluated(Evaluation(step=10, rewards=rewards, failed=210))
    assert alert.name == "validation_failures_rise"
    assert "on 101 of 256 at step 0, on 210 of 256 now" in alert.text


def failing_steps(
    rng: random.Random, chances: Sequence[float], groups: int = 16
) -> list[dict[str, Any]]:
    """Return lines of metrics whose tasks fail with a chance per step, in all eight rollouts."""
    return [
        {
            "kind": "train",
            "step": step,
            "rollouts": 8 * groups,
            "failed": 8 * sum(rng.random() < chance for _ in range(groups)),
            "batch/groups": groups,
        }
        for step, chance in enumerate(chances, 1)
    ]


@pytest.mark.parametrize("groups", [8, 16])
def test_a_slow_rise_of_failures_has_an_alert(groups: int) -> None:
    """Check failures that rise from a tenth to a half within 200 steps."""
    chances = [0.1 + 0.4 * step / 200 for step in range(200)]
    alerts = [read(failing_steps(random.Random(run), chances, groups)) for run in range(30)]
    assert [[alert.name for alert in each] for each in alerts] == [["failures_rise"]] * 30
    steps = sorted(alert.step for [alert] in alerts)
    assert steps[15] <= 130  # at a third of the tasks, or earlier
    [first] = alerts[0]
    assert first.text.startswith("the app fails more often: ")
    assert " % of the rollouts in steps 1 to " in first.text


@pytest.mark.parametrize(
    ("steps", "runs"), [(30, 100), (100, 100), pytest.param(300, 100, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("chance", [0.08, 0.4])
def test_an_app_that_fails_as_often_as_before_hardly_ever_has_an_alert(
    steps: int, runs: int, chance: float
) -> None:
    """Check tasks of which a constant share fails, each in all eight rollouts."""
    rng = random.Random(steps)
    alerts = sum(len(read(failing_steps(rng, [chance] * steps))) for _ in range(runs))
    assert alerts <= 0.01 * runs


@pytest.mark.parametrize(("count", "runs"), [(10, 400), (20, 400), (50, 400)])
@pytest.mark.parametrize(("tasks", "chance"), [(32, 0.15), (100, 0.07), (100, 0.4)])
def test_held_out_failures_that_stay_hardly_ever_have_an_alert(
    count: int, runs: int, tasks: int, chance: float
) -> None:
    rng, alerts = random.Random(count), 0
    for _ in range(runs):
        evaluations = []
        for step in range(count):
            failed = sum(rng.random() < chance for _ in range(tasks))
            rewards = dict.fromkeys(map(str, range(tasks)), 0.5)
            evaluations.append(Evaluation(step=step, rewards=rewards, failed=failed))
        alerts += any(validation_failures_rise(evaluations[: end + 1]) for end in range(1, count))
    assert alerts <= 0.02 * runs


def test_held_out_failures_count_each_cluster_once() -> None:
    rewards = {f"t{n}": 0.5 for n in range(256)}
    evaluations = [
        Evaluation(step=0, rewards=rewards, failed=64),
        Evaluation(step=5, rewards=rewards, failed=128),
    ]
    assert validation_failures_rise(evaluations)
    clusters = {task: task[-1] for task in rewards}  # 10 clusters
    assert not validation_failures_rise(
        [msgspec.structs.replace(each, clusters=clusters) for each in evaluations]
    )


@pytest.mark.parametrize(("tasks", "count", "runs"), [(10, 10, 50), (10, 20, 50), (32, 20, 50)])
def test_a_held_out_reward_that_stays_hardly_ever_has_an_alert(
    tasks: int, count: int, runs: int
) -> None:
    """Check tasks that a constant policy solves every other time."""
    rng, alerts = random.Random(tasks + count), 0
    for _ in range(runs):
        evaluations = [
            Evaluation(step=step, rewards={str(n): float(rng.random() < 0.5) for n in range(tasks)})
            for step in range(count)
        ]
        alerts += any(validation_falls(evaluations[:end]) for end in range(2, count + 1))
    assert alerts <= 0.02 * runs


def test_a_resumed_run_does_not_repeat_an_alert() -> None:
    rng = random.Random(8)
    levels = [0.7] * 8 + [0.2] * 12
    steps = [sampled(rng, step, level) for step, level in enumerate(levels, 1)]
    whole = read(steps)
    assert whole
    for cut in range(len(steps)):
        monitor = AlertMonitor()
        before = monitor.read(steps[:cut], [])
        after = [alert for each in steps[cut:] for alert in monitor.step(each)]
        assert [*before, *after] == whole


def test_a_run_that_redoes_its_last_step_in_the_same_process_is_read_anew(tmp_path: Path) -> None:
    """Check that the changed file of metrics is read again, although it has equally many lines."""

    def warnings_of(*groups: list[float]) -> list[str]:
        steps = [line(step, [group] * 12, time=0.0) for step, group in enumerate(groups, 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
        event = RunEvent(
            kind="step", step=3, folder=tmp_path, algorithm="", metric="", trains_weights=True
        )
        return print_alerts(event)

    assert warnings_of([0, 1], [0, 0], [0, 1]) == []
    [text] = warnings_of([0, 1], [0, 0], [0, 0])
    assert text.startswith("warning: no group varied in the latest 2 steps: in each of 24 the ")


@pytest.mark.parametrize(
    ("learned", "count", "text"),
    [
        ({"logprob_gap_mean": 0.04, "fresh_tokens": 9.0}, 0, ""),
        ({"logprob_gap_mean": 0.3, "fresh_tokens": 0.0}, 0, ""),
        (
            {"logprob_gap_mean": 0.3, "fresh_tokens": 9.0},
            1,
            "differ by 0.3 on average (at most 0.05 is rounding), so that the update is biased. "
            "Compare their dtypes and attention implementations, or weigh the tokens with "
            "loss=PolicyLoss(importance_cap=2.0); if it stays above 0.2, stop the run",
        ),
        ({"logprob_gap_mean": None, "fresh_tokens": 9.0}, 1, "differ by nan"),
        (
            {"logprob_gap_mean": 0.1, "fresh_tokens": 9.0, "engine_ratio_truncated": 0.01},
            0,
            "",
        ),
        (
            {"logprob_gap_mean": 0.3, "fresh_tokens": 9.0, "engine_ratio_truncated": 0.01},
            1,
            "attention implementations; if it stays above 0.2, stop the run",
        ),
        ({"skipped": 0.0, "loss": 1.0, "grad_norm": 1.0}, 0, ""),
        ({"skipped": 2.0}, 1, "2 updates were skipped, and changed no weights: the loss or the "),
        (
            {"skipped": 1.0, "loss": None, "grad_norm": 2.0},
            1,
            "1 update was skipped, and changed no weights: the loss or the gradient is not finite "
            "(loss nan, grad_norm 2); lower learning_rate",
        ),
        ({"skipped": 1.0, "loss": 0.0, "grad_norm": 0.0}, 1, "their rows had no token to train"),
    ],
)
def test_notes_on_updates(learned: dict[str, float | None], count: int, text: str) -> None:
    notes = update_notes({f"learner/{name}": value for name, value in learned.items()})
    assert len(notes) == count
    assert all(text in note for note in notes)


def test_reason_for_an_empty_batch() -> None:
    def notes(optimize: str, *rewards: float | None) -> list[str]:
        algorithm = LightningRL("a/model", optimize=optimize)
        episodes = [episode("g", member, reward) for member, reward in enumerate(rewards)]
        return update_notes(batch_metrics(algorithm.prepare(episodes).finish()))

    assert notes("writer", 1.0, 1.0) == ["no group varied: nothing to learn from in this step"]
    unscored = "no call could be trained in this step (2 rejected:unscored)"
    assert notes("writer", None, None) == [unscored]
    assert notes("reviewer", 1.0) == ["no call could be trained in this step (1 frozen)"]
    assert notes("writer", 0.0, 1.0) == []


def test_groups_that_resampling_could_not_replace() -> None:
    line = {"batch/groups": 3.0, "batch/groups:identical": 1.0, "batch/rows": 4.0}
    note = "after resampling 2 of 3 groups vary: the step trains on those"
    assert update_notes({**line, "resample/groups": 4}) == [note]
    assert update_notes({**line, "batch/groups:identical": 0.0, "resample/groups": 0}) == []
    assert update_notes(line) == []


def test_air_without_a_tool_call_is_told_once() -> None:
    steps = [
        line(step, [[0.0, 1.0]], **{"air/a/seen": 0.0, "air/unplaced": 0.0}) for step in (1, 2)
    ]
    assert [(alert.name, alert.step) for alert in read(steps)] == [("air_is_idle", 1)]
    assert read([line(1, [[0.0, 1.0]], **{"air/a/seen": 0.0, "air/b/seen": 2.0})]) == []


def test_rewards_on_calls_without_effect_are_told_once() -> None:
    counts = {"batch/stray_rewards": 2.0, "batch/unused_step_rewards": 3.0}
    alerts = read([line(step, [[0.0, 1.0]], **counts) for step in (1, 2)])
    assert [(alert.name, alert.step) for alert in alerts] == [
        ("rewards_are_stray", 1),
        ("call_rewards_are_unused", 1),
    ]
    stray, unused = (alert.text for alert in alerts)
    assert stray.startswith("2 rewards on a call went to an id that no call has")
    assert unused.startswith('the reward of 3 calls had no effect: credit="terminal"')


def test_fewer_tasks_than_a_step_takes_are_told() -> None:
    config = {"tasks_per_step": 16, "train": {"tasks": 4}}
    assert few_tasks_notes(config) == [
        "tasks_per_step=16, and there are 4 training tasks: in a step a task runs about 4 times, "
        "each time as a group of its own"
    ]
    assert few_tasks_notes({**config, "tasks_per_step": 4}) == []
    assert few_tasks_notes({"train": {"tasks": 4}}) == []  # of a search for prompts


def test_rollouts_and_calls_that_teach_nothing_are_told_once() -> None:
    counts = {"rollouts": 64, "silent": 48, "calls/trained": 12.0, "calls/rejected:cancelled": 4.0}
    counts |= {"calls/rejected:unscored": 9.0, "calls/rejected:replayed": 90.0}
    alerts = read([line(step, [[0.0, 1.0]], **counts) for step in (1, 2)])
    assert [(alert.name, alert.step) for alert in alerts] == [
        ("rollouts_are_silent", 1),
        ("calls_are_rejected", 1),
    ]
    silent, rejected = (alert.text for alert in alerts)
    assert silent.startswith("48 of 64 training rollouts made no call of the policy")
    assert rejected.startswith(
        "4 of 16 calls of the agents to train are rejected, so not trained (4 cancelled): "
    )
    few = {**counts, "silent": 15, "calls/rejected:cancelled": 3.0}
    assert read([line(1, [[0.0, 1.0]], **few)]) == []


def test_numbers_that_are_not_finite_do_not_end_the_alerts() -> None:
    """Check lines of `metrics.jsonl` with null for NaN."""
    lines = [line(step, [[0.0, 1.0]] * 8) for step in range(1, 12)]
    for each in lines:
        each |= dict.fromkeys(("learner/entropy", "learner/approx_kl", "learner/learning_rate"))
    assert read(lines) == []


def test_fit_shows_an_alert_and_inspect_shows_it_again(
    apps: Any, rl: Callable[..., Any], tmp_path: Path, lines: Any
) -> None:
    """Check a run in which every rollout of the reviewer has the reward 0.5."""
    from lightspan import Trainer
    from lightspan_tools.inspect import inspect_run

    tasks = [{"q": f"question {number}", "who": "reviewer"} for number in range(24)]
    algorithm = rl(optimize="reviewer", group_size=2, tasks_per_step=24)
    folder = tmp_path / "run"
    Trainer(algorithm, steps=1, folder=folder, reporter=lines).fit(apps.either, tasks)
    text = "no group varied in the latest 1 step: in each of 24 the rollouts had equal rewards"
    assert [said for said in lines.texts if said.startswith(f"step 1: warning: {text}")]
    assert f"\nwarning, step 1: {text}" in inspect_run(folder)


@pytest.mark.parametrize(
    ("failed", "rollouts", "text"),
    [
        (16, 16, "16 of 16 rollouts failed in step 2"),
        (1, 20, "1 of 20 rollouts failed in step 2"),
        (1, 21, ""),
        (0, 0, ""),
    ],
)
def test_the_latest_step_failed(failed: int, rollouts: int, text: str) -> None:
    first = line(1, [[0.0, 1.0]], failed=4, rollouts=4)
    latest = line(2, [[0.0, 1.0]], failed=failed, rollouts=rollouts)
    alert = latest_step_fails([first, latest, {"kind": "eval", "step": 2}])
    assert (alert.text if alert else "") == text
    alert = latest_step_fails([first, latest], "TimeoutError:\n  600 s" + "!" * 1000)
    if text:
        assert alert is not None
        assert alert.text.startswith(f"{text}, for example TimeoutError: 600 s!!!")
        assert len(alert.text) < 400
    assert latest_step_fails([]) is None
