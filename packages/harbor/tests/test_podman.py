"""Test trials in containers of Podman, whose images are made without a registry.

They need Debian's `podman runc netavark aardvark-dns iptables debootstrap`, and root to make the
images: one of Debian's packages, and one with mini-swe-agent from PyPI. That test trains, so it
needs `lightspan[train]` too. `LIGHTSPAN_TRIALS=200` sets the number of trials of the test that
kills runners.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor", reason="Harbor needs Python 3.12")

from kills import outlive_kills
from sandboxes import write_task

from lightspan_harbor import HarborTasks, trial
from lightspan_testing.wait import until

PROGRAMS = ("podman", "debootstrap")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(10_800),
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)) or os.geteuid() != 0,
        reason="needs podman, debootstrap and root",
    ),
]
IMAGE = "localhost/lightspan-debian:1"
MINI = "localhost/lightspan-mini:2.4.6"
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


@pytest.fixture
def mini(tmp_path: Path) -> str:
    """Return an image with mini-swe-agent, which is built if there is none."""
    if subprocess.run(["podman", "image", "exists", MINI]).returncode:
        folder = tmp_path / "image"
        wheels = ["--python-version=3.11", "--only-binary=:all:", f"--target={folder}/mini"]
        packages = ["mini-swe-agent==2.4.6", "litellm==1.110.2"]
        install = ["-m", "pip", "install", "-q", "--no-compile", *wheels, *packages]
        subprocess.run([sys.executable, *install], check=True)
        start = '#!/bin/sh\\nPYTHONPATH=/srv/mini exec python3 -m minisweagent.run.mini "$@"\\n'
        (folder / "Dockerfile").write_text(
            f"FROM {IMAGE}\nCOPY mini /srv/mini\n"
            f"RUN printf '{start}' > /usr/local/bin/mini-swe-agent"
            " && chmod +x /usr/local/bin/mini-swe-agent\n"
            "RUN python3 -m compileall -q /srv/mini || :\n"
        )
        podman("build", "-q", "-t", MINI, str(folder))
        shutil.rmtree(folder)
    return MINI


def left(trials: Path) -> list[str]:
    """Return the names of the containers of the trials in a folder."""
    names = podman("ps", "-a", "--format", "{{.Names}}").split()
    return [name for name in names if (trials / name.partition("__")[0]).is_dir()]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    write_task(tmp_path / "suite", "a", dockerfile=f"FROM {IMAGE}\nWORKDIR /app\n")
    return tmp_path / "suite"


async def test_a_trial_in_a_container(suite: Path, tmp_path: Path) -> None:
    [task] = HarborTasks(suite)
    program = trial(agent="oracle", environment="podman", folder=tmp_path / "trials")
    assert await program(task) == 1.0
    async with asyncio.timeout(60):
        await until(lambda: left(tmp_path / "trials") == [])


@pytest.mark.faults
async def test_runners_killed_at_random_lose_nothing(suite: Path, tmp_path: Path) -> None:
    """Check that all trials succeed although runners are killed, and that no container is left."""
    program = trial(agent="oracle", environment="podman", folder=tmp_path / "trials")
    await outlive_kills(program, suite, tmp_path, trials=TRIALS, max_pause_s=30)
    async with asyncio.timeout(120):
        await until(lambda: left(tmp_path / "trials") == [])


# --- an agent that is installed in the image --------------------------------------------------
def shell(command: str) -> str:
    """Return an answer that runs a command by mini-swe-agent's tool."""
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def address() -> str:
    """Return an address of this machine that containers reach: each has a network of its own."""
    done = subprocess.run(["hostname", "-I"], check=True, capture_output=True, text=True)
    return done.stdout.split()[0]


SUBMIT = shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
SOLUTION = (shell("cat answer.txt"), shell("echo done > answer.txt"), SUBMIT)


def test_an_agent_of_the_image_is_trained_with_every_call(mini: str, tmp_path: Path) -> None:
    """Check mini-swe-agent, unedited, in two trials of a training: one solves, one gives up.

    Every call is answered with recorded tokens and trained, and those of a session are one row.
    """
    pytest.importorskip("torch", reason="trains")
    from lightspan import LightningRL, LocalRunners, Trainer
    from lightspan.lightning.rows import merge
    from lightspan.lightning.selection import CallStatus, classify_calls
    from lightspan.lightning.transitions import trained_transitions
    from lightspan.progress import SilentReporter
    from lightspan.schema.routing import make_routing
    from lightspan.training.folder import RunFolder
    from lightspan_testing.scripted_engine import ScriptedEngine
    from lightspan_testing.stored_episodes import stored_episodes
    from lightspan_testing.tiny import CHAT_TEMPLATE, tiny_model
    from lightspan_torch.engine.tokenizer import load_tokenizer

    # a template that writes a call without content as `shell` does
    template = CHAT_TEMPLATE.replace("'\\n<tool_call>\\n", "'<tool_call>\\n")
    model = tiny_model(tmp_path / "model", seed=0, context=16_384, template=template)
    tokenizer = load_tokenizer(str(model))
    turns: dict[str, int] = {}

    def answer(request: Any) -> str:
        solves = not turns or request.rollout == next(iter(turns))
        turn = turns[request.rollout] = turns.get(request.rollout, -1) + 1
        return SOLUTION[turn] if solves else SUBMIT

    engine = ScriptedEngine(tokenizer, answer, policies={"policy": 0})
    dockerfile = f"FROM {mini}\nWORKDIR /app\n"
    write_task(tmp_path / "suite", "a", dockerfile=dockerfile, memory_mb=1024)
    options = {"skip_install": True, "config": {"agent": {"system_template": "Fix it."}}}
    app = trial(agent="mini-swe-agent", environment="podman", options=options)
    algorithm = LightningRL(model, group_size=2, tasks_per_step=1, timeout_s=None)
    folder = tmp_path / "run"
    Trainer(
        algorithm,
        runners=LocalRunners(2),
        steps=1,
        engine=engine,
        gateway=address(),
        folder=folder,
        reporter=SilentReporter(),
    ).fit(app, HarborTasks(tmp_path / "suite"))
    [line] = [line for line in RunFolder(folder).metrics() if line["kind"] == "train"]
    assert (line["calls/trained"], line["failed"], line["lost"], line["damaged"]) == (4, 0, 0, 0)
    found = {}
    for episode in stored_episodes(RunFolder(folder).store_url):
        coverage = classify_calls(episode, make_routing({"*": "policy"}, None, "policy"))
        assert {entry.status for entry in coverage.entries} == {CallStatus.TRAINED}
        assert all(call.record is not None for call in episode.calls)
        rows = merge(trained_transitions(episode, coverage))
        found[episode.reward] = (len(episode.calls), len(rows))
        trajectory = folder / "trials" / episode.attempt_id / "agent/trajectory.json"
        steps = json.loads(trajectory.read_text())["steps"]
        assert steps[0]["message"] == "Fix it."
        assert sum(step["source"] == "agent" for step in steps) == len(episode.calls)
    assert found == {1.0: (3, 1), 0.0: (1, 1)}
    assert left(folder / "trials") == []
