"""Test which groups a step takes while others are running: none too old, each once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan import GEPA, LLM, Alternate, LightningRL, LoRA, Policy
from lightspan.algorithms.async_rollouts import due_groups, next_episodes
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.lightning.episode import Episode
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LearnerCapabilities
from lightspan.schema.records import AttemptStatus, Mode, Outcome


@pytest.mark.parametrize(
    ("left", "per_step", "due"),
    [
        ([], 2, 0),
        ([1, 1], 2, 0),
        ([0, 1], 2, 1),
        ([0, 0, 1, 1], 2, 2),
        ([1, 1, 1, 2], 2, 1),  # three may wait for one more step, which trains two
        ([0, 2, 2, 2, 2, 2], 2, 2),  # the last, and one of the five that two steps cannot train
        ([2] * 6, 2, 2),
    ],
)
def test_what_a_step_cannot_leave(left: list[int], per_step: int, due: int) -> None:
    assert due_groups(left, per_step) == due


@dataclass
class Ends:
    """Replace a trainer; groups end in a random order that `rng` determines."""

    last_step: int
    rng: random.Random
    step: int = 0
    in_flight: dict[str, int] = field(default_factory=dict)
    most: int = 0

    def publish(self) -> None:
        self.in_flight = {group: age + 1 for group, age in self.in_flight.items()}

    def next_tasks(self, count: int) -> list[int]:
        return [0] * count

    async def submit(self, tasks: Sequence[Any], group_size: int) -> list[str]:
        new = [f"{self.step}-{number}" for number in range(len(tasks))]
        self.in_flight |= dict.fromkeys(new, 0)
        self.most = max(self.most, len(self.in_flight))
        return new

    async def take(self, count: int, first: Sequence[str]) -> list[Episode]:
        assert len(first) <= count <= len(self.in_flight)
        others = [group for group in self.in_flight if group not in first]
        taken = [*first, *self.rng.sample(others, count - len(first))]
        for group in taken:
            del self.in_flight[group]
        return [episode(group) for group in taken for _ in range(2)]


def episode(group: str) -> Episode:
    return Episode(
        rollout_id=group,
        attempt_id=group,
        task_id="t",
        group_id=group,
        mode=Mode.TRAIN,
        status=AttemptStatus.SUCCEEDED,
        outcome=Outcome.OK,
        spans=(),
    )


@given(
    overlap=st.integers(1, 4),
    per_step=st.integers(1, 4),
    steps=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_every_group_is_trained_once_and_in_time(
    overlap: int, per_step: int, steps: int, seed: int
) -> None:
    """Check the groups for any order in which groups end, with and without publishing in a step."""
    rng = random.Random(seed)
    world: Any = Ends(steps, rng)
    trained: Counter[str] = Counter()
    for world.step in range(1, steps + 1):
        episodes, metrics = asyncio.run(next_episodes(world, overlap, per_step, 2))
        taken = {each.group_id for each in episodes}
        assert len(taken) == per_step
        trained.update(taken)
        assert 0 <= metrics["overlap/behind"] <= metrics["overlap/behind_max"] <= overlap
        assert metrics["overlap/in_flight"] == len(world.in_flight)
        if rng.random() < 0.8:
            world.publish()
    assert trained.total() == len(trained) == steps * per_step
    assert not world.in_flight
    assert world.most <= (overlap + 1) * per_step


def test_an_engine_that_cannot_change_its_weights_under_calls_is_refused() -> None:
    engine = EngineCapabilities(exact_tokens=True, in_place_update=False)
    LightningRL("model").check(engine, LearnerCapabilities())
    with pytest.raises(UnsupportedError, match="overlap=1: the engine cannot update weights"):
        LightningRL("model", overlap=1).check(engine, LearnerCapabilities())


@pytest.mark.parametrize(
    "options",
    [
        {"lora": LoRA(rank=4, dropout=0.3)},
        {"optimize": {"a": Policy(lora=LoRA(rank=4, dropout=0.3)), "b": "other"}},
    ],
    ids=["all", "one policy"],
)
def test_dropout_is_refused(options: dict[str, Any]) -> None:
    """With dropout, the ratio of an update's first step would not be 1."""
    with pytest.raises(ConfigError, match=r"LoRA\(dropout=0\.3\): .* use dropout=0"):
        LightningRL("model", **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"overlap": -1}, r"overlap=-1"),
        ({"overlap": 1.5}, r"overlap=1\.5"),
        (
            {"overlap": 2, "max_staleness": 1},
            r"overlap=2 trains groups that are up to 2 versions old, and max_staleness=1",
        ),
        ({"overlap": 1, "resample": 1}, r"resample=1 waits for all rollouts of a step"),
    ],
)
def test_what_contradicts_it(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        LightningRL("model", **options)


def test_prompts_and_weights_take_turns() -> None:
    prompts = GEPA(optimize=["a"], reflection=LLM(base_url="http://x", model="m"), max_rollouts=9)
    with pytest.raises(ConfigError, match=r"LightningRL\(overlap=1\)\): rollouts cannot"):
        Alternate(prompts, LightningRL("model", overlap=1), max_rollouts=10_000)
