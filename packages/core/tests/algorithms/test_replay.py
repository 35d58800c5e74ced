"""Test the replay of groups with rare successes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lightspan import LightningRL, Replay
from lightspan.algorithms.adaptive_tasks import GroupReturns, ReturnRange
from lightspan.algorithms.replay import GroupHistory, ReplayGroup
from lightspan.errors import ConfigError
from lightspan.lightning.batch import prepare_batch
from lightspan.lightning.episode import Episode
from lightspan.lightning.rows import Row
from packages.core.tests.algorithms.scripted_world import Scripted, episode
from packages.core.tests.lightning.steps import weight_mass

MODEL = "a/model"
RARE, HALF, ALL, NONE = (0, 0, 0, 1), (0, 0, 1, 1), (1, 1, 1, 1), (0, 0, 0, 0)
Groups = Sequence[Sequence[float | None]]


class World(Scripted):
    """A world that has one group per step, and keeps the rows of each update."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self.rows: list[list[Row]] = []

    def update(self, rows: Sequence[Row], *args: Any, **more: Any) -> dict[str, float]:
        self.rows.append(list(rows))
        return super().update(rows, *args, **more)


async def steps(algorithm: LightningRL, world: Any, count: int) -> list[dict[str, float]]:
    lines = []
    for _ in range(count):
        lines.append(await algorithm.run_step(world))
        world.step += 1
    return lines


def learner(**options: Any) -> LightningRL:
    given = {"replay": Replay(groups=1), "group_size": 4, "tasks_per_step": 1, **options}
    return LightningRL(MODEL, **given)


# --- what a replayed group is -------------------------------------------------------------------
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
async def test_a_replayed_group_has_the_statistics_tokens_and_versions_it_had(
    estimator: str,
) -> None:
    """Check that only the divisor of the loss differs: 4 scored rollouts first, then 8."""
    algorithm = learner(estimator=estimator, weight="rollout")
    world: Any = World([RARE, HALF])
    await steps(algorithm, world, 2)
    first, second = world.rows
    again = [row for row in second if row.rollout_id in {one.rollout_id for one in first}]
    assert len(again) == len(first) == 4
    assert again == [replace(row, weights=[w / 2 for w in row.weights]) for row in first]
    assert any(any(row.logprobs) for row in first)


async def test_replayed_groups_count_as_their_own_observations() -> None:
    """Compare a step with the batch of its new group and the replayed one."""
    algorithm = learner()
    world: Any = World([RARE, HALF])
    await steps(algorithm, world, 2)
    batch = algorithm.last_batch
    assert batch is not None
    both = [episode(f"g{n}", m, r) for n in (1, 0) for m, r in enumerate((RARE, HALF)[n])]
    expected = prepare_batch(both, algorithm.coverages(both), algorithm.batch_config).finish()
    assert (batch.size, batch.rollouts) == (8, expected.rollouts)
    assert (batch.rows, batch.explanations) == (expected.rows, expected.explanations)
    assert weight_mass(batch) == pytest.approx(1)


async def test_metrics_name_the_replayed_groups() -> None:
    """Check the literal values: the second step has the new group's 4 rows and 4 replayed ones.

    Metrics of rollouts and calls are of the new group alone, those of the batch of both.
    """
    first, second = await steps(learner(), World([RARE, HALF]), 2)
    keys = ("replay/groups", "replay/age", "replay/row_share")
    assert [first[key] for key in keys] == [0, 0, 0]
    assert [second[key] for key in keys] == [1, 1, 0.5]
    assert (second["rollouts"], second["reward"], second["calls/trained"]) == (4, 0.5, 4)
    assert (second["batch/scored"], second["batch/groups"], second["batch/rows"]) == (8, 2, 8)


@pytest.mark.parametrize("kind", ["unscored", "damaged", "rejected"])
async def test_no_update_consists_of_replayed_rollouts_alone(kind: str) -> None:
    """Check steps in which no call of a new rollout can be trained.

    Their group is not replayed then: it keeps its turn, and is replayed in the next step. A step
    whose new group is scored but equal replays, because its rollouts count in the loss.
    """
    world: Any = World([RARE, (None,) * 4 if kind == "unscored" else HALF, NONE])
    new = world.rollouts

    async def rollouts(*args: Any) -> list[Episode]:
        episodes = await new(*args)
        if world.step != 2 or kind == "unscored":
            return list(episodes)
        if kind == "damaged":
            return [replace(one, capture_errors=("lost",)) for one in episodes]
        calls = [msgspec.structs.replace(one.calls[0], record=None) for one in episodes]
        return [replace(one, calls=(call,)) for one, call in zip(episodes, calls, strict=True)]

    world.rollouts = rollouts
    algorithm = learner()
    algorithm._was_scored = algorithm._was_computed = True
    first, second, third = await steps(algorithm, world, 3)
    withheld = [line["replay/withheld"] for line in (first, second, third)]
    groups = [line["replay/groups"] for line in (first, second, third)]
    assert (withheld, groups) == ([0, 1, 0], [0, 0, 1])
    assert "learner/approx_kl" not in second
    assert world.updated == [[f"ro-g0-{member}" for member in range(4)]] * 2
    assert world.notes == [
        "replay: 1 group not trained again, because no call of the step's new rollouts can be "
        "trained"
    ]


async def test_without_replay_each_group_is_trained_once() -> None:
    algorithm = learner(replay=None)
    world: Any = World([RARE, HALF])
    lines = await steps(algorithm, world, 2)
    assert not any(key.startswith("replay/") for line in lines for key in line)
    assert world.updated == [
        [f"ro-g0-{member}" for member in range(4)],
        [f"ro-g1-{member}" for member in range(4)],
    ]
    assert algorithm.state() == {}


async def test_damaged_and_unscored_rollouts_stay_out() -> None:
    """Check a group with a damaged rollout and one without a reward, when it is replayed."""
    world: Any = World([(0, None, 0, 1), HALF])

    def damaged(found: list[Episode]) -> list[Episode]:
        bad = {"ro-g0-0"}
        return [
            replace(one, capture_errors=("lost",)) if one.rollout_id in bad else one
            for one in found
        ]

    new, stored = world.rollouts, world.stored_episodes

    async def rollouts(*args: Any) -> list[Episode]:
        return damaged(await new(*args))

    async def stored_episodes(ids: Sequence[str]) -> list[Episode]:
        return damaged(await stored(ids))

    world.rollouts, world.stored_episodes = rollouts, stored_episodes
    first, second = await steps(learner(replay=Replay(rare=0.5)), world, 2)
    assert (first["batch/damaged"], first["batch/unscored"], first["batch/scored"]) == (1, 1, 2)
    assert second["batch/scored"] == 4 + 2
    assert world.updated[1] == ["ro-g0-2", "ro-g0-3", *(f"ro-g1-{m}" for m in range(4))]


async def test_the_rewards_of_a_judge_are_kept() -> None:
    """Check that a replayed group has the rewards that it was trained with, not the app's."""
    world: Any = World([NONE, HALF])
    new = world.rollouts

    async def judged(*args: Any) -> list[Episode]:
        return [
            replace(one, reward=float(one.rollout_id == "ro-g0-2"), reward_source="scored")
            if one.group_id == "g0"
            else one
            for one in await new(*args)
        ]

    world.rollouts = judged
    algorithm = learner()
    await steps(algorithm, world, 2)
    assert algorithm.last_batch is not None
    values = {
        why.rollout_id: why.value
        for why in algorithm.last_batch.explanations.values()
        if why.group_id == "g0"
    }
    assert values == {"ro-g0-0": 0, "ro-g0-1": 0, "ro-g0-2": 1, "ro-g0-3": 0}


# --- which groups are replayed ------------------------------------------------------------------
def history(settings: Replay, *groups: tuple[int, str, Sequence[float]]) -> dict[str, ReplayGroup]:
    """Return the groups to replay after some groups, each (step, task, returns)."""
    past = GroupHistory(returns=ReturnRange([0.0, 1.0]))
    for step, task, returns in groups:
        members = [episode(f"{task}{step}", m, reward) for m, reward in enumerate(returns)]
        group = GroupReturns(task, members, returns, len(set(returns)) > 1)
        past.add_replays(step, [group], settings)
    return past.replays


def test_only_groups_with_rare_successes_are_kept() -> None:
    groups = [(1, "rare", RARE), (1, "half", HALF), (1, "all", ALL), (1, "none", NONE)]
    assert [*history(Replay(), *groups)] == ["rare"]
    assert [*history(Replay(rare=0.5), *groups)] == ["rare", "half"]


def test_a_task_has_one_group_until_its_successes_are_not_rare() -> None:
    kept = history(Replay(), (1, "a", RARE), (2, "a", RARE))
    assert [(one.group_id, one.step) for one in kept.values()] == [("a2", 2)]
    assert history(Replay(), (1, "a", RARE), (2, "a", NONE))["a"].step == 1
    for common in (HALF, ALL):
        assert history(Replay(), (1, "a", RARE), (2, "a", common)) == {}


def test_the_size_is_bounded_and_the_oldest_goes_first() -> None:
    kept = history(Replay(size=2), (1, "a", RARE), (2, "b", RARE), (3, "c", RARE), (4, "b", RARE))
    assert [(task, one.step) for task, one in kept.items()] == [("c", 3), ("b", 4)]


async def test_the_age_is_bounded() -> None:
    """Check that step 1's group is replayed in steps 2 and 3, and not in step 4."""
    world: Any = World([RARE, NONE, NONE, NONE])
    lines = await steps(learner(replay=Replay(max_age=2)), world, 4)
    assert [line["replay/groups"] for line in lines] == [0, 1, 1, 0]
    assert [line["replay/age"] for line in lines] == [0, 1, 2, 0]
    assert len(world.updated) == 3


async def test_groups_take_turns() -> None:
    """Check that the group with the fewest replays is first, and of equals the newest."""
    world: Any = World([RARE, RARE, NONE, NONE, NONE])
    await steps(learner(), world, 5)
    of_step = [{name.split("-")[1] for name in names} for names in world.updated]
    assert of_step == [{"g0"}, {"g0", "g1"}, {"g1"}, {"g1"}, {"g0"}]


async def test_a_group_that_was_pruned_is_left_out() -> None:
    world: Any = World([RARE, HALF, HALF])
    algorithm = learner()
    await steps(algorithm, world, 1)
    world.pruned.add("g0")
    second, third = await steps(algorithm, world, 2)
    assert (second["replay/groups"], third["replay/groups"]) == (0, 0)
    assert world.notes == ["replay: group g0 is no longer in the store"]


async def test_resample_and_replay_do_not_disturb_each_other() -> None:
    """Check that replayed groups replace no new group, and are not counted as new ones."""
    algorithm = learner(tasks_per_step=2, resample=1)
    world: Any = World([RARE, HALF, NONE, HALF, HALF])
    _, second = await steps(algorithm, world, 2)
    assert (second["resample/groups"], second["rollouts"], second["replay/groups"]) == (1, 12, 1)
    assert algorithm.last_batch is not None
    assert {name.split("-")[1] for name in algorithm.last_batch.rollouts} == {"g0", "g3", "g4"}
    assert second["tasks/zero_gradient"] == pytest.approx(1 / 3)


async def test_a_checkpoint_has_the_ids_of_the_groups() -> None:
    """Check that a resumed run replays the same group, read from the store."""
    groups = [RARE, RARE, HALF, HALF]
    whole, world = learner(), World(groups)
    await steps(whole, world, 2)
    state = msgspec.json.decode(msgspec.json.encode(whole.state()))
    assert {task: one["rewards"] for task, one in state["history"]["replays"].items()} == {
        f"g{n}": {f"ro-g{n}-{m}": [float(m == 3), "returned", None] for m in range(4)}
        for n in range(2)
    }
    expected = await steps(whole, world, 2)
    resumed, again = learner(), World(groups)
    resumed.load_state(state)
    again.asked, again.step, again.versions = [1, 1], 3, {"policy": 3}
    again.updated = [["earlier"]] * 2
    assert await steps(resumed, again, 2) == expected
    assert again.rows == world.rows[2:]
    assert resumed.state() == whole.state()


# --- refusals -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": 3}, r"replay=3: use lightspan.Replay\(…\), or None"),
        ({"estimator": "reinforce++"}, r"Replay\(.* estimator='reinforce\+\+' or critic= uses"),
        ({"estimator": "reinforce++_baseline"}, "statistics of the whole batch"),
        ({"estimator": "ppo"}, "statistics of the whole batch"),
        (
            {"max_staleness": 8, "overlap": 1},
            r"overlap=1 with Replay\(.* up to 9 versions old, and max_staleness=8 rejects",
        ),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningRL(MODEL, **{"replay": Replay(), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, "Replay: groups=0 must be at least 1"),
        ({"max_age": 0}, "Replay: max_age=0 must be at least 1"),
        ({"size": 0, "groups": 1}, r"Replay\(groups=1\): size=0 must be at least 1"),
        ({"size": 3, "groups": 4}, r"Replay\(groups=4\): size=3 must be at least 4"),
        ({"rare": 0}, "Replay: rare=0"),
        ({"rare": 1.5}, "Replay: rare=1.5"),
    ],
)
def test_settings_outside_their_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Replay(**options)
