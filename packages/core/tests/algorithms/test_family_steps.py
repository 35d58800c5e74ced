"""Test the steps of `credit="family"`: where rollouts are forked, what is counted and restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lightspan import Forks, LightningRL
from lightspan.algorithms.metrics import rollout_metrics
from lightspan.errors import ConfigError
from lightspan.lightning.episode import Episode
from lightspan.lightning.forks import ForkPoint
from lightspan.lightning.returns import group_rewards
from lightspan.schema.records import AttemptStatus, Mode, Outcome
from lightspan.schema.token_records import CallOutcome
from packages.core.tests.algorithms.scripted_world import Scripted
from packages.core.tests.lightning.family_steps import Sampled, rollout


class Forking(Scripted):
    """A trainer context whose rollouts make `lengths[task]` calls, and whose forks get 0.

    Args:
        groups: rewards of the rollouts of each task.
        lengths: number of calls of the rollouts of each task.
        departs: number of forks of each point that depart.
    """

    def __init__(
        self, groups: Sequence[Sequence[float | None]], lengths: Sequence[int], departs: int = 0
    ) -> None:
        super().__init__(groups)
        self.lengths = lengths
        self.departs = departs
        self.points: list[ForkPoint] = []
        self.trunks: dict[str, Episode] = {}

    async def rollouts(
        self, tasks: Sequence[int], group_size: int, mode: Mode = Mode.TRAIN
    ) -> list[Episode]:
        made = []
        for task in tasks:
            for member, reward in enumerate(self.groups[task]):
                name = f"g{task}-{member}"
                calls = [Sampled(f"{name}-{n}", [3 + member]) for n in range(self.lengths[task])]
                made.append(rollout(name, reward, calls, group=f"g{task}"))
        self.trunks |= {episode.attempt_id: episode for episode in made}
        return made

    async def forks(self, points: Sequence[ForkPoint], count: int) -> list[Episode]:
        self.points = list(points)
        made = []
        for point in points:
            trunk, call = self.trunks[point.attempt_id], point.call
            assert call is not None
            for number in range(count - self.departs):
                name = f"{trunk.attempt_id.removeprefix('at-')}-f{number}"
                forked = rollout(
                    *(name, 0.0, [Sampled(f"{name}-0", [9])]),
                    forks=(trunk, call.call_id),
                    group=f"{name}-group",
                )
                made.append(forked)
        return made


def algorithm(**options: Any) -> LightningRL:
    defaults: dict[str, Any] = {"estimator": "rloo", "credit": "family", "group_size": 2}
    return LightningRL(
        "a/model", **{**defaults, "tasks_per_step": 2, "learning_rate": 1e-5, **options}
    )


async def test_the_call_is_that_of_the_step_before() -> None:
    """Check the half of the mean of 2 and 6 calls, which a later process knows too."""
    world = Forking([[1, 0]] * 6, [2, 6, 6, 6, 2, 2])
    learns = algorithm()
    first = await learns.run_step(world)  # type: ignore[arg-type]
    assert world.points == []
    assert first["forks/rollouts"] == 0
    state = msgspec.json.decode(msgspec.json.encode(learns.state()))
    assert state == {"middle_call": 3}
    again = algorithm()
    again.load_state(state)
    metrics = await again.run_step(world)  # type: ignore[arg-type]
    assert [point.number for point in world.points] == [3] * 4
    assert metrics["forks/rollouts"] == 4
    assert again.state() == {"middle_call": 4}
    metrics = await again.run_step(world)  # type: ignore[arg-type]
    # rollouts of two calls have no fourth
    assert (metrics["forks/rollouts"], metrics["batch/families"]) == (0, 4)


async def test_forks_are_in_no_count_and_in_the_group_of_their_trunk() -> None:
    world = Forking([[1, 0], [1, 1]], [2, 2], departs=1)
    learns = algorithm(forks=Forks(each=3, at=2), minibatches=2)
    metrics = await learns.run_step(world)  # type: ignore[arg-type]
    assert metrics["forks/rollouts"] == 12
    assert metrics["forks/departed"] == 4
    assert (metrics["rollouts"], metrics["scored"], metrics["reward"]) == (4, 4, 0.75)
    assert metrics["calls"] == 8
    assert (metrics["batch/families"], metrics["batch/groups"]) == (4, 2)
    assert not {key for key in metrics if key.startswith("tasks/")}
    batch = learns.last_batch
    assert batch is not None
    assert {why.group_id for why in batch.explanations.values()} == {"g0", "g1"}
    assert batch.rollouts == ("ro-g0-0", "ro-g0-1", "ro-g1-0", "ro-g1-1")
    assert len(world.updated) == 2
    assert not set(world.updated[0]) & set(world.updated[1])


async def test_a_refusal_is_told_and_the_rollout_counts_whole() -> None:
    class Odd(Forking):
        """A trainer context in which the first call of the first rollout was cancelled."""

        async def rollouts(self, *args: Any, **options: Any) -> list[Episode]:
            first, *others = await super().rollouts(*args, **options)
            call, *rest = first.calls
            cancelled = msgspec.structs.replace(call, outcome=CallOutcome.CANCELLED)
            return [replace(first, calls=(cancelled, *rest)), *others]

    odd = Odd([[1, 0], [1, 1]], [2, 2])
    metrics = await algorithm(forks=Forks(at=2)).run_step(odd)  # type: ignore[arg-type]
    assert (metrics["forks/refused"], metrics["forks/rollouts"]) == (1, 3)
    assert metrics["batch/families"] == 4
    [note] = odd.notes
    beginning = "1 of 4 rollouts cannot be forked (for example: call 1, of 'writer', has no answer"
    assert note.startswith(beginning)


def test_forks_are_in_no_rate_of_failures_and_in_no_statistics_of_tasks() -> None:
    trunk = rollout("a", 1.0, [Sampled("a1"), Sampled("a2")])
    fork = rollout(
        *("f", 0.0, [Sampled("f1")]),
        forks=(trunk, "a2"),
        status=AttemptStatus.FAILED,
        outcome=Outcome.APP_ERROR,
    )
    assert rollout_metrics([trunk, fork]) == rollout_metrics([trunk])
    learns = algorithm()
    coverages = learns.coverages([trunk, fork])
    assert group_rewards([trunk, fork], coverages) == ({"g": [1.0]}, {"g": []})


def test_a_function_is_named_in_the_settings() -> None:
    def early(state: Any) -> bool:
        return bool(state.turn == 0)

    forks = algorithm(forks=Forks(at=early)).config()["forks"]
    assert forks == {"each": 1, "at": f"{early.__module__}:{early.__qualname__}"}
    assert algorithm().config()["forks"] == {"each": 1, "at": None}
    assert LightningRL("a/model", learning_rate=1e-5).config()["forks"] is None


async def later(state: Any) -> bool:
    return True


def test_an_async_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Forks: at=.*:later is async: use a plain function"):
        Forks(at=later)
