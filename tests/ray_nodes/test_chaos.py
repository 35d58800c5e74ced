"""Test a training in a Ray cluster while nodes, actors and processes are killed repeatedly.

It ends with exactly the same transitions as without faults.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos import Chaos  # type: ignore[import-not-found]

from lightspan import RayRunners
from lightspan.schema.records import AttemptStatus, Rollout, RolloutStatus
from lightspan.stores import open_store
from tests.ray_nodes.conftest import RUNNER
from tests.ray_nodes.nodes import Cluster, Node
from tests.ray_nodes.trained import APP, HERE, Script, learned, trainer

pytestmark = pytest.mark.timeout(1800)

FAULTS = 30 if os.environ.get("LIGHTSPAN_SEED") else 12
STEPS = 10 * FAULTS
"""Number of steps, with eight rollouts each: a new node takes seconds, while the others
continue.
"""
TASKS = [{"q": f"question {number}"} for number in range(8 * STEPS)]
PACE_S = 0.02


class Nodes:
    """Two nodes with room for one actor each; one of them is killed and replaced."""

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        self._cluster = cluster
        self._dice = dice
        self._lasting, self._doomed = self._added(), self._added()

    def faults(self) -> dict[str, Callable[[], None]]:
        """Return name → function that waits for something to kill, and kills it."""
        return {
            "a node killed": self._kill_node,
            "an actor killed": lambda: self._kill_one(actors_of),
            "a process of an actor killed": lambda: self._kill_one(processes_of),
        }

    def _added(self) -> Node:
        node = self._cluster.add(cpus=1)
        node.wait_ready()
        return node

    def _kill_node(self) -> None:
        self._awaited(actors_of, self._doomed)
        self._doomed.kill()
        self._doomed = self._added()

    def _kill_one(self, of: Callable[[Node], list[psutil.Process]]) -> None:
        self._dice.choice(self._awaited(of, self._lasting, self._doomed)).kill()

    def _awaited(
        self, of: Callable[[Node], list[psutil.Process]], *nodes: Node
    ) -> list[psutil.Process]:
        """Return the processes to kill; an actor takes seconds to come back after a death."""
        latest = time.monotonic() + 120
        while not (found := [process for node in nodes for process in of(node)]):
            assert time.monotonic() < latest, "nothing to kill"
            time.sleep(0.1)
        return found


def actors_of(node: Node) -> list[psutil.Process]:
    return node.running("ray::RunnerActor")


def processes_of(node: Node) -> list[psutil.Process]:
    return node.orphans("lightspan.runners.process_main")


async def ends(trained: Any, store: str) -> Counter[AttemptStatus]:
    """Return how the attempts ended; check that all rollouts have succeeded, each once."""
    run_id = trained.folder.read_config()["run_id"]
    async with open_store(store) as opened:
        states = await opened.rollouts(run_id=run_id)
        assert Counter(state.status for state in states) == {RolloutStatus.SUCCEEDED: len(TASKS)}
        attempts = await opened.attempts([state.rollout.rollout_id for state in states])
    succeeded = [each for each in attempts if each.status is AttemptStatus.SUCCEEDED]
    assert len({each.rollout_id for each in succeeded}) == len(succeeded)
    assert not [each for each in succeeded if each.capture_errors]
    return Counter(each.status for each in attempts)


@pytest.fixture
def own() -> Iterator[Cluster]:
    """Run a cluster for this test alone, so that other tests need not wait for killed nodes."""
    with Cluster(LIGHTSPAN_STORE_KEY=RUNNER) as cluster:
        yield cluster


def test_nodes_are_killed_again_and_again(
    own: Cluster,
    tiny: Path,
    served: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moments: Callable[[Any], random.Random],
) -> None:
    """Check a training on two nodes, one of which is never killed."""
    dice, script = moments("ray"), Script()
    nodes = Nodes(own, dice)
    runners = RayRunners(8, actors=2, address=own.address, app_dirs=HERE)
    calm = trainer(tmp_path / "calm", tiny, Script(), runners, served, steps=STEPS)
    assert calm.fit(APP, TASKS).steps == STEPS
    assert asyncio.run(ends(calm, served)) == {AttemptStatus.SUCCEEDED: len(TASKS)}

    # more is killed than a rollout would be tried again for
    patient = functools.partial(Rollout, max_infrastructure_tries=1000)
    monkeypatch.setattr("lightspan.training.session.Rollout", patient)
    runners = RayRunners(8, actors=2, address=own.address, app_dirs=HERE)
    disturbed = trainer(
        tmp_path / "disturbed", tiny, script, runners, served, steps=STEPS, pace_s=PACE_S
    )
    chaos = Chaos(nodes.faults(), FAULTS, lambda: script.asked, lambda: None, dice)
    chaos.start()
    try:
        assert disturbed.fit(APP, TASKS).steps == STEPS
    finally:
        chaos.end()
    found = asyncio.run(ends(disturbed, served))
    print(f"{FAULTS} faults: {dict(chaos.happened)}; attempts: {dict(found)}")
    assert chaos.happened.total() == FAULTS
    assert learned(disturbed) == learned(calm)
    assert found.pop(AttemptStatus.SUCCEEDED) == len(TASKS)
    assert set(found) == {AttemptStatus.LOST}
