"""Test that killed nodes, actors and trainers lose attempts, but no rollouts, and leave no
process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from lightspan import RayRunners, Trainer
from lightspan.schema.records import Attempt, RolloutStatus
from lightspan.stores import open_store
from tests.ray_nodes.conftest import RUNNER, TRAINER
from tests.ray_nodes.nodes import Cluster, Node
from tests.ray_nodes.trained import APP, HERE, TASKS, Script, asked, learned, trainer

pytestmark = pytest.mark.timeout(900)

ACTOR = "ray::RunnerActor"
APP_PROCESS = "lightspan.runners.process_main"


async def read(trained: Trainer, store: str) -> tuple[Counter[RolloutStatus], list[Attempt]]:
    run_id = trained.folder.read_config()["run_id"]
    async with open_store(store) as opened:
        states = await opened.rollouts(run_id=run_id)
        attempts = await opened.attempts([state.rollout.rollout_id for state in states])
    return Counter(state.status for state in states), list(attempts)


def wait_for_calls(node: Node, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until all eight rollouts of the first step have a running call by actors on this
    node.
    """
    while asked(8) not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    assert node.running(ACTOR)
    assert node.running(APP_PROCESS)


def at_work(node: Node) -> list[psutil.Process]:
    return node.running(ACTOR) + node.orphans(APP_PROCESS)


def wait_until_idle(node: Node) -> None:
    """Wait until no process of the node is working; only pytest's timeout limits the wait."""
    while at_work(node):
        time.sleep(0.1)


def test_the_head_that_is_lost(
    cluster: Cluster, node: Node, tiny: Path, served: str, tmp_path: Path
) -> None:
    """Check the loss of the head while all attempts have running calls.

    Ray ends the trainer and the nodes. The run is resumed in another cluster with exactly the same
    transitions; running rollouts are cancelled and started anew.
    """
    from tests.ray_nodes import trained

    runners = RayRunners(8, actors=2, address=cluster.address, app_dirs=HERE)
    calm = trainer(tmp_path / "calm", tiny, Script(), runners, served)
    assert calm.fit(APP, TASKS).steps == 2
    soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    with Cluster(LIGHTSPAN_STORE_KEY=RUNNER, **soon) as lost, (tmp_path / "log").open("w+b") as log:
        [head] = lost.nodes
        other = lost.add(cpus=4)
        other.wait_ready()
        command = [sys.executable, trained.__file__, str(tmp_path / "run"), str(tiny)]
        own = {"LIGHTSPAN_STORE_KEY": TRAINER, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [*command, lost.address, served],
            stdout=log,
            stderr=log,
            env={**os.environ, **soon, **own},
        )
        wait_for_calls(other, process, tmp_path / "log")
        head.kill()
        assert process.wait() != 0
        wait_until_idle(other)
    runners = RayRunners(8, actors=2, address=cluster.address, app_dirs=HERE)
    again = trainer(tmp_path / "run", tiny, Script(), runners, served)
    assert again.fit(APP, TASKS, resume=True).steps == 2
    assert learned(again) == learned(calm)
    statuses, _ = asyncio.run(read(again, served))
    assert statuses == {RolloutStatus.SUCCEEDED: 16, RolloutStatus.CANCELLED: 8}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_trainers_end_is_that_of_all_actors(
    cluster: Cluster, node: Node, tiny: Path, served: str, tmp_path: Path, how: signal.Signals
) -> None:
    """Check `kill -9` during calls, and Ctrl-C."""
    from tests.ray_nodes import trained

    command = [sys.executable, trained.__file__, str(tmp_path / "run"), str(tiny)]
    with (tmp_path / "log").open("w+b") as log:
        process = subprocess.Popen(
            [*command, cluster.address, served],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        wait_for_calls(node, process, tmp_path / "log")
        process.send_signal(how)
        process.wait()
    wait_until_idle(node)
    if how is signal.SIGINT:
        assert "KeyboardInterrupt" in (tmp_path / "log").read_text()
