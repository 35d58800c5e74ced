"""Test that joining a Ray cluster needs its token, and that a cluster without a token is
refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_nodes import joins
from tests.ray_nodes.nodes import Cluster, Node

pytestmark = pytest.mark.timeout(600)

TOKEN_HINT = "set RAY_AUTH_MODE=token where each node and the trainer are started"


def joined(address: str, store: str, *options: str, **environment: str | None) -> str:
    """Run a program that joins the cluster; return the last line that it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name, value in environment.items():
        env.pop(name, None)
        env |= {} if value is None else {name: value}
    command = [sys.executable, joins.__file__, address, store, *options]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return ended.stdout.strip().splitlines()[-1]


def test_the_right_token(cluster: Cluster, node: Node, served: str) -> None:
    assert joined(cluster.address, served) == "ran: 3.0"


def test_a_wrong_token(cluster: Cluster, node: Node, served: str) -> None:
    said = joined(cluster.address, served, RAY_AUTH_TOKEN_PATH=None, RAY_AUTH_TOKEN="f" * 32)
    assert said.startswith(
        f"ConfigError: Ray cluster {cluster.address} runs, but rejects the token of "
        f"this process: {TOKEN_HINT}"
    )


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_a_trainer_that_asks_for_no_token(cluster: Cluster, served: str, mode: str | None) -> None:
    """Check that a trainer without token authentication is refused before it connects."""
    said = joined(cluster.address, served, RAY_AUTH_MODE=mode)
    assert said.startswith(
        f"ConfigError: this process would join Ray cluster {cluster.address} without a token ("
    )


def test_a_cluster_that_asks_for_no_token(served: str) -> None:
    """Check that a trainer with a token is refused, and that one without token can use the
    cluster.
    """
    with Cluster(RAY_AUTH_MODE="disabled", LIGHTSPAN_STORE_KEY="a-runner-key-0123456789") as open_:
        open_.add(cpus=1).wait_ready()
        said = joined(open_.address, served)
        assert said.startswith("LightspanError: an actor could not start in the Ray cluster (")
        assert "start each node with the RAY_AUTH_MODE of the trainer" in said
        said = joined(open_.address, served, "without_token", RAY_AUTH_MODE="disabled")
        assert said == "ran: 3.0"


def test_a_cluster_of_this_machine(tmp_path: Path) -> None:
    """Check that a local cluster has its own token, and works with a store in a file."""
    url = f"sqlite:///{tmp_path}/run.db"
    alone = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": None, "RAY_AUTH_MODE": None}
    assert joined("local", url, **alone) == "ran: 3.0"
    assert (tmp_path / ".ray" / "auth_token").read_text()
