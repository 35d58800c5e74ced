"""What a run's history says of a training that goes wrong: heard then, and not otherwise."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.core.training.record_history import history

from lightspan.training.folder import RunFolder
from lightspan.training.results import Evaluation
from lightspan.training.symptoms import Symptom, Watch

RECORDED = Path(__file__).parent / "histories"
"""Histories of real runs; README.md there says how they were recorded."""


def line(step: int, rewards: Sequence[Sequence[float]], **more: float) -> dict[str, Any]:
    """The line of a training step, of the rewards of each of its groups."""
    means = [math.fsum(group) / len(group) for group in rewards]
    mean = math.fsum(means) / len(means)
    variance = math.fsum((value - mean) ** 2 for value in means) / max(1, len(means) - 1)
    scored = sum(map(len, rewards))
    idle = [group for group in rewards if min(group) == max(group)]
    return {
        "kind": "train",
        "step": step,
        "reward": mean,
        "reward_se": math.sqrt(variance / len(means)),
        "batch/groups": len(rewards),
        "batch/groups:equal_rewards": len(idle),
        "batch/scored": scored,
        "batch/zero_advantage_rollouts": sum(map(len, idle)),
        "batch/trained_tokens": 10 * scored,
        **more,
    }


def sampled(
    rng: random.Random, step: int, mean: float, *, groups: int = 16, size: int = 8, **more: float
) -> dict[str, Any]:
    """A step whose tasks differ in how often they are solved, by .3 or so."""
    chances = (min(1.0, max(0.0, rng.gauss(mean, 0.3))) for _ in range(groups))
    rewards = [[float(rng.random() < chance) for _ in range(size)] for chance in chances]
    return line(step, rewards, **more)


def heard(lines: Sequence[dict[str, Any]], planned: int = 100) -> list[Symptom]:
    return Watch(planned).read(lines, [])


def names(found: Sequence[Symptom]) -> list[str]:
    return [symptom.name for symptom in found]


MOVING = {"learner/approx_kl": 0.01, "learner/learning_rate": 1e-4, "learner/entropy": 0.5}


# --- real runs ------------------------------------------------------------------------------


def recorded(name: str) -> list[Symptom]:
    """What was heard of a real run."""
    lines = [json.loads(text) for text in (RECORDED / f"{name}.jsonl").read_text().splitlines()]
    evaluations = [
        Evaluation(
            step=line["step"],
            rewards={f"task {n}": reward for n, reward in enumerate(line["rewards"])},
        )
        for line in lines
        if line["kind"] == "eval"
    ]
    return Watch(20).read(lines, evaluations)


LEARNED = [path.stem for path in RECORDED.glob("*.jsonl") if "-seed" in path.stem[-6:]]


def test_there_are_histories_of_two_seeds_that_learned() -> None:
    assert {*LEARNED} >= {"sql-seed0", "sql-seed1"}


@pytest.mark.parametrize("run", sorted(LEARNED))
def test_example_that_learns_hears_nothing(run: str) -> None:
    """Every one whose name ends with its seed: nothing was changed in it."""
    assert not recorded(run)


def test_a_history_has_what_is_looked_at_in_its_run(one_step: tuple[Path, list[Any]]) -> None:
    run = RunFolder(one_step[0])
    before, train, after = history(run.path)
    [line] = [line for line in run.metrics() if line["kind"] == "train"]
    assert (before["kind"], after["kind"], train["kind"]) == ("eval", "eval", "train")
    rewards = [[*found.rewards.values()] for found in run.evaluations()]
    assert [before["rewards"], after["rewards"]] == rewards
    assert train.items() <= line.items()
    assert {key for key in line if key in FIGURES} <= train.keys()


def test_what_a_history_keeps_is_enough(tmp_path: Path) -> None:
    """Read as the run itself would be: a reward that falls is heard of either."""
    rng = random.Random(0)
    run = RunFolder(tmp_path / "run")
    run.create()
    for step in range(1, 13):
        run.add_metrics(sampled(rng, step, 0.9 - 0.06 * step, **MOVING, **{"seconds/app": 1.0}))
    run.release()
    kept = [*history(run.path)]
    assert "seconds/app" not in kept[0]
    said = Watch(20).read(run.metrics(), [])
    assert {*names(said)} == {"reward_falls"}
    assert Watch(20).read(kept, []) == said


def test_permuted_rewards_are_heard() -> None:
    reward, validation = recorded("sql-seed0-permuted")
    assert (reward.name, reward.step) == ("reward_falls", 10)
    assert reward.text.startswith(
        "the training reward is falling: 0.742 in steps 1 to 2, 0.340 in steps 9 to 10 (standard "
        "error of the difference 0.0"
    )
    assert (validation.name, validation.step) == ("validation_falls", 10)


def test_permuted_rewards_of_another_seed_are_heard() -> None:
    [found] = recorded("sql-seed1-permuted")
    assert (found.name, found.step) == ("validation_falls", 10)


def test_permuted_rewards_of_a_crew_are_heard_where_it_falls() -> None:
    """Of seeds 0 and 1 nothing fell: noise carried the held-out reward up by .09 and .06."""
    validation, reward = recorded("rag-crewai-seed2-permuted")
    assert (validation.name, validation.step) == ("validation_falls", 2)
    assert (reward.name, reward.step) == ("reward_falls", 6)
    assert not recorded("rag-crewai-seed0-permuted")
    assert not recorded("rag-crewai-seed1-permuted")


def test_rate_that_is_30_times_too_high_is_heard() -> None:
    """All rollouts fail after the first step: that no group varies any more goes without saying."""
    found, validation = recorded("sql-seed0-rate-x30")
    assert [(s.name, s.step) for s in (found, validation)] == [
        ("reward_falls", 4),
        ("validation_falls", 5),
    ]
    assert "approx_kl is 7.7 per token and step). Lower learning_rate (now 0.012)" in found.text


def test_rate_at_which_the_policy_does_not_move_is_heard() -> None:
    [found] = recorded("sql-seed0-rate-x0.001")
    assert (found.name, found.step) == ("policy_stays", 10)
    assert "all 20 steps together change at most 0.96 % of the rollouts" in found.text
    assert "Raise learning_rate (now 4e-07)" in found.text


# --- odd metrics --------------------------------------------------------------------------------
FIGURES = (
    *("reward", "reward_se", "batch/groups", "batch/groups:equal_rewards", "batch/scored"),
    *("batch/zero_advantage_rollouts", "batch/trained_tokens"),
    *("learner/approx_kl", "learner/learning_rate", "learner/entropy"),
)
USUAL = (0, 0.1, 0.5, 2, 8.0)
ODD = (-5.0, 1e19, 1e200, -1e308, 1e-320, math.nan, math.inf, 10**400, None, "x", True, [], {})


def test_metrics_of_any_kind_stop_no_training() -> None:
    """Those of an algorithm of one's own may be anything, under the same names too."""
    for run in range(400):
        rng = random.Random(run)
        usual = {name: rng.choice(USUAL) for name in FIGURES}
        watch = Watch(rng.choice([0, 1, 20]))
        for step in range(1, 13):
            odd = {name: rng.choice(ODD) for name in FIGURES if rng.random() < 0.1}
            assert all(symptom.text for symptom in watch.step({"step": step, **usual, **odd}))


# --- where nothing happens --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "size", "mean"), [(16, 8, 0.5), (2, 4, 0.5), (4, 8, 0.95), (16, 8, 0.05)]
)
def test_policy_that_stays_as_it_is_hears_of_no_fall(groups: int, size: int, mean: float) -> None:
    """Less than one run of a hundred, however often it is looked."""
    alarms: Counter[str] = Counter()
    for run in range(100):
        rng = random.Random(f"{run}/{groups}/{size}/{mean}")
        steps = [
            sampled(rng, step, mean, groups=groups, size=size, **MOVING) for step in range(1, 31)
        ]
        alarms.update(set(names(heard(steps))))
    assert alarms["reward_falls"] <= 2
    assert alarms["no_group_varies"] <= (2 if mean == 0.5 else 100)
    assert not alarms["entropy_collapses"]
    assert not alarms["policy_stays"]


def test_policy_that_learns_hears_nothing() -> None:
    """From .3 to .6 in 40 steps, which is one standard deviation of the tasks."""
    alarms: Counter[str] = Counter()
    for run in range(100):
        rng = random.Random(run)
        steps = [sampled(rng, step, 0.3 + 0.3 * step / 40, **MOVING) for step in range(1, 41)]
        alarms.update(names(heard(steps, planned=40)))
    assert alarms.total() <= 2, alarms


def test_equal_evaluations_hear_of_no_fall() -> None:
    alarms = 0
    for run in range(200):
        rng, watch = random.Random(run), Watch(100)
        chances = [rng.random() for _ in range(60)]
        for step in range(12):
            rewards = {f"t{n}": float(rng.random() < chance) for n, chance in enumerate(chances)}
            alarms += bool(watch.evaluated(Evaluation(step=step, rewards=rewards)))
    assert alarms <= 2


def test_few_groups_show_little_however_far_apart_they_are() -> None:
    """Two groups a step without any variance: four against four may be chance."""
    solved, failed = [[1.0] * 4] * 2, [[0.0] * 4] * 2
    steps = [line(step, solved) for step in (1, 2)] + [line(step, failed) for step in (3, 4)]
    assert not heard(steps)
    single = [line(step, [[1.0, 0.0]] if step < 9 else [[0.0, 0.0]]) for step in range(1, 20)]
    assert "reward_falls" not in names(heard(single))


# --- what is heard ----------------------------------------------------------------------------


def test_falling_reward_is_heard_once_and_again_if_it_got_worse() -> None:
    rng = random.Random(0)
    levels = [0.7] * 8 + [0.4] * 8 + [0.0] * 8
    steps = [sampled(rng, step, level, **MOVING) for step, level in enumerate(levels, 1)]
    first, second = (found for found in heard(steps) if found.name == "reward_falls")
    assert 8 < first.step <= 12
    assert 16 < second.step <= 20
    assert first.text.startswith("the training reward is falling: 0.7")
    assert "approx_kl is 0.01 per token and step" in first.text
    assert "Lower learning_rate (now 0.0001), or hold the policy near its start with" in first.text
    assert second.severity > 1.5 * first.severity


def test_policy_that_hardly_moves_is_heard() -> None:
    """10 tokens at KL 1e-9: 100 steps change at most 100 * sqrt(10 * 1e-9 / 2) of the rollouts."""
    still = {**MOVING, "learner/approx_kl": 1e-9, "learner/learning_rate": 1e-9}
    groups = [[0.0, 0.0, 1.0], [0.0, 1.0, 1.0]] * 8  # all of them vary
    steps = [line(step, groups, **still) for step in range(1, 16)]
    [found] = heard(steps, planned=100)
    assert (found.name, found.step) == ("policy_stays", 10)
    assert "all 100 steps together change at most 0.71 % of the rollouts" in found.text
    assert "Raise learning_rate (now 1e-09): tenfold at first" in found.text
    assert not heard(steps, planned=1000)  # 7 %


def test_warm_up_is_waited_for() -> None:
    rng = random.Random(3)
    steps = [
        sampled(
            rng, step, 0.5, **{"learner/approx_kl": 1e-12, "learner/learning_rate": 1e-9 * step}
        )
        for step in range(1, 19)
    ]
    assert not heard(steps)


def test_groups_that_do_not_vary_are_heard() -> None:
    rng = random.Random(4)
    steps = [sampled(rng, step, 0.5, **MOVING) for step in range(1, 6)]
    solved = [line(step, [[1.0] * 8] * 16) for step in range(6, 12)]
    [found] = [found for found in heard([*steps, *solved]) if found.name == "no_group_varies"]
    assert found.step == 8
    assert found.text.startswith(
        "no group varied in the latest 3 steps: in each of 48 the rollouts had equal rewards (mean "
        "1.000), so there was nothing to learn from. Give tasks that are neither solved nor failed"
    )


def test_estimator_without_groups_learns_from_groups_of_one() -> None:
    steps = [
        {**line(step, [[0.0], [1.0]] * 16), "batch/zero_advantage_rollouts": 0}
        for step in range(1, 9)
    ]
    assert not heard(steps)


def test_entropy_that_collapses_is_heard_unless_the_reward_has_risen() -> None:
    def run(end: float) -> list[str]:
        rng = random.Random(5)
        return names(
            heard(
                [
                    sampled(
                        rng,
                        step,
                        0.2 + (end - 0.2) * step / 16,
                        **{**MOVING, "learner/entropy": 2.0 * 0.8**step},
                    )
                    for step in range(1, 17)
                ]
            )
        )

    assert set(run(0.2)) == {"entropy_collapses"}
    assert not run(0.9)


def test_validation_that_falls_is_heard_on_the_tasks_that_both_scored() -> None:
    rng, watch = random.Random(6), Watch(100)
    before = {f"t{n}": float(rng.random() < 0.8) for n in range(100)}
    worse = {task: float(reward and rng.random() < 0.7) for task, reward in before.items()}
    assert not watch.evaluated(Evaluation(step=0, rewards=before))
    assert not watch.evaluated(Evaluation(step=5, rewards={**before, "new": 0.0}))
    [found] = watch.evaluated(Evaluation(step=10, rewards=worse))
    assert found.text.startswith("the held-out reward has fallen since step 0: by 0.")
    assert 'Trainer(keep="best"), fit(…, selection=…)' in found.text
    # a few tasks can all fail by chance
    few = Watch(100)
    few.evaluated(Evaluation(step=0, rewards=dict.fromkeys("abcd", 1.0)))
    assert not few.evaluated(Evaluation(step=5, rewards=dict.fromkeys("abcd", 0.0)))


def test_tasks_of_one_cluster_fall_together() -> None:
    """Half of 100 tasks fall: no chance if they are independent, but it may be if of two worlds."""
    before = {f"{world} {n}": 1.0 for world in "ab" for n in range(50)}
    after = {task: float(task[0] == "b") for task in before}
    worlds = {task: task[0] for task in before}
    for clusters, expected in (({}, 1), (worlds, 0), ({task: task for task in before}, 1)):
        watch = Watch(100)
        watch.evaluated(Evaluation(step=0, rewards=before, clusters=clusters))
        found = watch.evaluated(Evaluation(step=5, rewards=after, clusters=clusters))
        assert len(found) == expected


@pytest.mark.parametrize("missing", ["reward", "reward_se", "batch/groups"])
def test_what_an_algorithm_does_not_report_is_not_looked_at(missing: str) -> None:
    rng = random.Random(7)
    levels = [0.7] * 8 + [0.1] * 8
    steps = [sampled(rng, step, level) for step, level in enumerate(levels, 1)]
    for found in steps:
        del found[missing]
    assert not heard(steps)


def test_long_run_is_looked_at() -> None:
    """More ways to choose among 8,192 groups than a float holds."""
    rng = random.Random(9)
    solved, failed = [[1.0, 1.0], [1.0, 0.0]] * 32, [[0.0, 0.0], [1.0, 0.0]] * 32
    watch = Watch(10_000)
    steps = [line(step, rng.sample(solved, 64)) for step in range(1, 130)]
    assert not watch.read(steps, [])
    later = [line(step, failed) for step in range(130, 133)]
    assert set(names(watch.read(later, []))) == {"reward_falls"}


def test_resumed_run_does_not_say_it_again() -> None:
    rng = random.Random(8)
    levels = [0.7] * 8 + [0.2] * 12
    steps = [sampled(rng, step, level, **MOVING) for step, level in enumerate(levels, 1)]
    whole = heard(steps)
    assert "reward_falls" in names(whole)
    for cut in range(len(steps)):
        watch = Watch(100)
        before = watch.read(steps[:cut], [])
        after = [found for one in steps[cut:] for found in watch.step(one)]
        assert [*before, *after] == whole


# --- in a run -----------------------------------------------------------------------------------


def test_run_says_what_is_wrong_and_inspect_says_it_again(
    apps: Any, rl: Callable[..., Any], tmp_path: Path, lines: Any
) -> None:
    """Every rollout of the reviewer earns .5."""
    from lightspan import Trainer
    from lightspan.reports.inspect import inspect_run

    tasks = [{"q": f"question {number}", "who": "reviewer"} for number in range(24)]
    algorithm = rl(optimize="reviewer", group_size=2, tasks_per_step=24)
    folder = tmp_path / "run"
    Trainer(algorithm, steps=1, folder=folder, reporter=lines).fit(apps.either, tasks)
    text = "no group varied in the latest 1 step: in each of 24 the rollouts had equal rewards"
    assert [said for said in lines.texts if said.startswith(f"step 1: warning: {text}")]
    assert f"\nwarning, step 1: {text}" in inspect_run(folder)
