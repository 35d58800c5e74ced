"""Test `LightningRL(overlap=1)`: rollouts go on while weights are updated."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.algorithms import TrainerContext
from lightspan.algorithms.task_sampler import Epochs
from lightspan.cli import main
from lightspan.errors import BudgetError, ConfigError
from lightspan.lightning.episode import Episode
from lightspan.schema.records import Mode, RolloutStatus
from lightspan.stores import open_store
from lightspan.training.checkpoints import latest, load_state
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.rollout_view import training_steps

pytestmark = pytest.mark.slow

STEPS, TASKS, GROUP = 4, 2, 4


@pytest.fixture(scope="module")
def run(tiny: Path, apps: Any, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Train; two of the first four groups make their second call only after a step was trained."""
    folder = tmp_path_factory.mktemp("runs") / "overlap"
    order = Epochs(range(STEPS * TASKS), 0).take(0, 4)
    tasks = [
        {
            "q": f"question {number}",
            "waits": number in order[2:],
            "metrics": str(folder / "metrics.jsonl"),
        }
        for number in range(STEPS * TASKS)
    ]
    algorithm = LightningRL(
        tiny,
        optimize="writer",
        group_size=GROUP,
        tasks_per_step=TASKS,
        learning_rate=1e-3,
        overlap=1,
    )
    runners = LocalRunners(16, processes=1)
    trainer = Trainer(algorithm, runners=runners, steps=STEPS, folder=folder, validate_every=2)
    held_out = [{"q": f"held out {number}", "waits": False} for number in range(3)]
    trainer.fit(apps.asks_again, tasks, held_out)
    return RunFolder(folder)


def versions(episode: Any) -> list[int]:
    """Return the versions with which the tokens of each call were sampled."""
    return [version for call in episode.calls for version, _ in call.record.versions]


def test_the_next_rollouts_go_on_while_a_step_is_trained(run: RunFolder) -> None:
    """Check the waiting rollouts, which would never end without overlap."""
    lines = [line for line in run.metrics() if line["kind"] == "train"]
    told = [(each["overlap/behind"], each["overlap/in_flight"]) for each in lines]
    assert told == [(0.0, 2), (1.0, 2), (1.0, 2), (1.0, 0)]
    assert [line["rollouts"] for line in lines] == [TASKS * GROUP] * STEPS


def test_each_token_has_the_version_that_it_was_sampled_with(run: RunFolder) -> None:
    episodes = stored_episodes(run.store_url, mode=Mode.TRAIN)
    first = min(version for episode in episodes for version in versions(episode))
    begun = [tuple(versions(each)) for each in episodes if versions(each)[0] == first]
    assert Counter(begun) == {(first, first): 2 * GROUP, (first, first + 1): 2 * GROUP}


def test_every_group_is_trained_once_and_whole(run: RunFolder) -> None:
    found = latest(run.checkpoints)
    assert found is not None
    state = load_state(found)
    assert (state.in_flight, state.returned) == ({}, [])
    episodes = stored_episodes(run.store_url, mode=Mode.TRAIN)
    assert len(episodes) == STEPS * TASKS * GROUP
    trained: set[str] = set()
    for step in range(1, STEPS + 1):
        rollouts = {why.rollout_id for why in run.explanations(step).values()}
        assert len(rollouts) == TASKS * GROUP
        assert not rollouts & trained
        trained |= rollouts
    assert trained == {episode.rollout_id for episode in episodes}


def test_an_evaluation_has_one_version(run: RunFolder) -> None:
    episodes = stored_episodes(run.store_url, mode=Mode.VAL)
    evaluated: dict[int, set[int]] = {}
    for episode in episodes:
        step = int(episode.rollout_id.split("-")[-4])
        evaluated.setdefault(step, set()).update(versions(episode))
    assert sorted(evaluated) == [0, 2, 4]
    assert {len(each) for each in evaluated.values()} == {1}


def test_each_call_is_shown_with_the_step_that_trained_it(run: RunFolder, tmp_path: Path) -> None:
    rows = tmp_path / "transitions.jsonl"
    assert main(["export", str(run.path), "transitions", "-o", str(rows)]) == 0
    transitions = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {row["verdict"] for row in transitions if row["mode"] == "train"} == {"trained"}
    of_step = Counter(row["step"] for row in transitions if row["mode"] == "train")
    assert of_step == dict.fromkeys(range(1, STEPS + 1), TASKS * GROUP * 2)
    assert training_steps(run).keys() == {
        row["group_id"] for row in transitions if row["mode"] == "train"
    }


class Asks(LightningRL):
    """An algorithm that requests its rollouts by the function `ask`."""

    def __init__(self, ask: Callable[[TrainerContext], Any], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ask = ask

    async def collect(self, world: TrainerContext) -> list[Episode]:
        await self.ask(world)
        raise AssertionError("that was taken")


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda world: world.submit([0], 0), "submit: group_size=0 must be at least 1"),
        (lambda world: world.rollouts([0], -1), "rollouts: group_size=-1 must be at least 1"),
        (
            lambda world: world.submit([0, 1], 2, resources=[{}]),
            r"submit\(resources=\) has 1 mappings for 2 tasks",
        ),
    ],
)
def test_what_a_world_cannot_do(
    ask: Callable[[TrainerContext], Any], error: str, tiny: Path, apps: Any, tmp_path: Path
) -> None:
    algorithm = Asks(ask, tiny, optimize="writer", learning_rate=1e-3)
    trainer = Trainer(algorithm, runners=1, steps=1, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match=error):
        trainer.fit(apps.spell, [{"q": "question"}])


def test_nothing_is_left_to_ask_once_a_budget_is_used_up(
    tiny: Path, apps: Any, tmp_path: Path
) -> None:
    """Check that no rollouts are left that runners started by hand would execute."""
    algorithm = LightningRL(
        tiny, optimize="writer", group_size=2, tasks_per_step=2, learning_rate=1e-3, overlap=2
    )
    run = RunFolder(tmp_path / "run")
    trainer = Trainer(algorithm, runners=1, steps=8, folder=run.path, max_frozen_calls=3)

    async def left() -> list[Any]:
        async with open_store(run.store_url) as store:
            return await store.rollouts(status=[RolloutStatus.QUEUED])

    with ScriptedServer(lambda request: "scripted help") as server:
        tasks = [{"q": f"question {number}", "url": server.url} for number in range(6)]
        with pytest.raises(BudgetError):
            trainer.fit(apps.asks_elsewhere, tasks)
    assert asyncio.run(left()) == []
    found = latest(run.checkpoints)
    assert found is not None
    assert len(load_state(found).in_flight) == 4  # which a run that goes on begins anew
