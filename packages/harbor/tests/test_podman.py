"""Test trials in containers of Podman, whose base image is made without a registry.

They need Debian's `podman runc netavark aardvark-dns iptables debootstrap`, and root to make the
image. `LIGHTSPAN_TRIALS=200` sets the number of trials of the test that kills runners.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("harbor", reason="Harbor needs Python 3.12")

from kills import outlive_kills
from sandboxes import write_task

from lightspan_harbor import HarborTasks, trial
from lightspan_testing.wait import until

PROGRAMS = ("podman", "debootstrap")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)) or os.geteuid() != 0,
        reason="needs podman, debootstrap and root",
    ),
]
IMAGE = "localhost/lightspan-debian:1"
TRIALS = int(os.environ.get("LIGHTSPAN_TRIALS", "20"))
# runc, because crun does not start without cgroups of systemd; the network is the host's, so that
# an agent in a container reaches the gateway
CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
netns = "host"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""


def podman(*arguments: str) -> str:
    return subprocess.run(["podman", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module", autouse=True)
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Configure Podman, and make the base image if there is none."""
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(CONF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        if subprocess.run(["podman", "image", "exists", IMAGE]).returncode:
            root = folder / "root"
            packages = "--include=python3,tmux,ca-certificates"
            debootstrap = ["debootstrap", "--variant=minbase", packages, "bookworm", str(root)]
            subprocess.run(debootstrap, check=True, capture_output=True)
            archive = folder / "root.tar"
            subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
            podman("import", str(archive), IMAGE)
            shutil.rmtree(root)
        yield


def left() -> list[str]:
    """Return the names of all containers of trials."""
    return [
        name for name in podman("ps", "-a", "--format", "{{.Names}}").split() if "__env" in name
    ]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    write_task(tmp_path / "suite", "a", dockerfile=f"FROM {IMAGE}\nWORKDIR /app\n")
    return tmp_path / "suite"


async def test_a_trial_in_a_container(suite: Path, tmp_path: Path) -> None:
    [task] = HarborTasks(suite)
    program = trial(agent="oracle", environment="podman", folder=tmp_path / "trials")
    assert await program(task) == 1.0
    async with asyncio.timeout(60):
        await until(lambda: left() == [])


@pytest.mark.faults
async def test_runners_killed_at_random_lose_nothing(suite: Path, tmp_path: Path) -> None:
    """Check that all trials succeed although runners are killed, and that no container is left."""
    program = trial(agent="oracle", environment="podman", folder=tmp_path / "trials")
    await outlive_kills(program, suite, tmp_path, trials=TRIALS, max_pause_s=30)
    async with asyncio.timeout(120):
        await until(lambda: left() == [])
