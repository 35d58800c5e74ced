"""Test options of runners in a Ray cluster, and actors that find no room or die at their start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from app_environment import app_environment  # type: ignore[import-not-found]

from lightspan import RayRunners
from lightspan.errors import LightspanError
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Mode,
    Rollout,
)
from lightspan.stores.protocol import Store
from tests.ray_nodes.nodes import Cluster, Node
from tests.ray_nodes.trained import HERE

pytestmark = pytest.mark.timeout(900)

LONG_S = 600.0
"""A lease that is longer than any test."""


def plan(store: Store, app: str) -> RunnerPlan:
    return RunnerPlan(store_url=store.url, app=app, run_id="run-1", lease_s=LONG_S)


@asynccontextmanager
async def started(runners: RayRunners, told: RunnerPlan) -> AsyncIterator[None]:
    try:
        await runners.start(told)
        yield
    finally:
        await runners.stop()


async def enqueue(store: Store, *tasks: Any) -> list[str]:
    rollouts = [
        Rollout(
            rollout_id=f"ro-{number}",
            task=task,
            task_id=f"t-{number}",
            run_id="run-1",
            mode=Mode.VAL,
        )
        for number, task in enumerate(tasks)
    ]
    await store.enqueue(rollouts)
    return [rollout.rollout_id for rollout in rollouts]


async def ended(runners: RayRunners, store: Store, names: list[str]) -> list[Attempt]:
    while not all(state.status.final for state in await store.rollouts(names)):
        runners.check()
        await asyncio.sleep(0.05)
    return await store.attempts(names)


async def test_an_interpreter_of_the_apps_own_and_a_process_for_each_attempt(
    cluster: Cluster, node: Node, store: Store, tmp_path: Path
) -> None:
    """Check that the attempts run in two processes of the app's interpreter, without Ray."""
    python = app_environment(tmp_path / "environment", "openai", "lightspan-gateway")
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    task = {"folder": str(meeting), "prefix": str(tmp_path / "environment")}
    names = await enqueue(store, {**task, "name": "one"}, {**task, "name": "two"})
    runners = RayRunners(
        2, address=cluster.address, isolation="process", python=python, app_dirs=HERE
    )
    async with started(runners, plan(store, "ray_apps:meets")):
        attempts = await ended(runners, store, names)
    assert [attempt.message for attempt in attempts] == ["", ""]
    said = [attempt.reward.dimensions for attempt in attempts if attempt.reward]
    assert len({each.pop("process") for each in said}) == 2
    each = {"reward": 1.0, "interpreter": 1.0, "token": 1.0, "ray": 0.0}
    assert said == [each, each]


async def test_a_cluster_without_room(cluster: Cluster, node: Node, store: Store) -> None:
    """Check actors that no node has room for: the start fails, and no actor is left."""
    runners = RayRunners(2, actors=2, address=cluster.address, cpus=30, timeout_s=10)
    with pytest.raises(
        LightspanError,
        match=r"^the Ray cluster had no room for any of 2 actors for 10 s: each asks for 30 CPU; "
        r"free are [\d.]+ of \d+ CPU; start more nodes, or ask for less \(actors=, cpus=, "
        r"resources=\)$",
    ):
        await runners.start(plan(store, "lightspan_testing.sample_apps:right"))
    while node.running("ray::RunnerActor"):  # noqa: ASYNC110 - processes of others
        await asyncio.sleep(0.05)


async def test_an_actor_without_room_joins_later(
    cluster: Cluster, node: Node, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Check two actors of which one has room: work begins, and a new node gets the other one."""
    names = await enqueue(store, {"number": 1}, {"number": 2})
    runners = RayRunners(2, actors=2, address=cluster.address, cpus=3, timeout_s=10)
    async with started(runners, plan(store, "lightspan_testing.sample_apps:right")):
        told = "1 of 2 actors have no place in the Ray cluster and join when there is room"
        assert [text for text in caplog.messages if told in text]
        attempts = await ended(runners, store, names)
        assert [attempt.status for attempt in attempts] == [AttemptStatus.SUCCEEDED] * 2
        other = cluster.add(cpus=3)
        while not other.running("ray::RunnerActor"):
            runners.check()
            await asyncio.sleep(0.05)
    other.kill()
