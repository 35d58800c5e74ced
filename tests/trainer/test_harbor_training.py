"""Test training on Harbor tasks. Sandboxes are folders, so no container is needed.

The runners are in this environment if it has Harbor (`nox -s tests_harbor`). Otherwise
`LIGHTSPAN_HARBOR_PYTHON` names the interpreter of theirs: Python 3.12 or newer with
`packages/core packages/programs packages/harbor`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pages import blocks  # type: ignore[import-not-found]

from lightspan import GEPA, LLM, LightningRL, LocalRunners, PromptTemplate, Trainer
from lightspan.progress import SilentReporter
from lightspan.schema.records import Mode
from lightspan.training.folder import RunFolder
from lightspan_harbor import HarborTasks, trial
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.inspect import inspect_run
from lightspan_ui.views import RolloutDetail
from packages.ui.tests.ui_client import serving

HERE = sys.executable if importlib.util.find_spec("harbor") else ""
PYTHON = os.environ.get("LIGHTSPAN_HARBOR_PYTHON", HERE)
SANDBOXES = Path(__file__).parents[2] / "packages/harbor/tests"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="no Harbor: LIGHTSPAN_HARBOR_PYTHON names none"),
]


def runners(count: int = 2) -> LocalRunners:
    return LocalRunners(count, python=PYTHON, app_dirs=[SANDBOXES])


def write_suite(suite: Path, names: str, check: str) -> HarborTasks:
    """Write tasks whose verifier prints 1 or 0."""
    for name in names:
        task = suite / name
        (task / "tests").mkdir(parents=True)
        (task / "environment").mkdir()
        (task / "environment/Dockerfile").write_text("FROM scratch\n")
        (task / "task.toml").write_text('version = "1.0"\n')
        (task / "instruction.md").write_text("Say it.")
        test = f"#!/bin/bash\n({check}) > /logs/verifier/reward.txt\necho checked\n"
        (task / "tests/test.sh").write_text(test)
    return HarborTasks(suite)


@pytest.fixture(scope="module")
def followed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Run the programs of the guide; return its folder and what the dry run and the training print.

    The sandbox is a folder, and the agent sends its instruction to the model.
    """
    folder = tmp_path_factory.mktemp("guide")
    shutil.copy(SANDBOXES / "sandboxes.py", folder)
    replaced = {
        'environment="docker"': 'environment="sandboxes:Folder"',
        "--environment docker": "--environment sandboxes:Folder",
        "terminus-2": "sandboxes:Agent",
        ', options={"max_turns": 8}': "",
        "Qwen/Qwen3-0.6B": str(tiny),
        ".venv-harbor/bin/python": PYTHON,
        ".venv-train/bin/lightspan": f"{sys.executable} -m lightspan.cli",
    }
    for _, name, text in blocks("guides/harbor.md"):
        if not name:
            continue
        for old, new in replaced.items():
            text = text.replace(old, new)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copytree(folder / "suite/train", folder / "suite/val")
    printed = []
    for command in (["sh", "dry.sh"], [sys.executable, "train.py"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    return folder, *printed


def test_the_guides_training_trains_every_call(followed: tuple[Path, str, str]) -> None:
    folder, _, printed = followed
    assert "held-out reward: 0.00 -> 0.00" in printed
    run = RunFolder(folder / "runs/harbor")
    lines = [line for line in run.metrics() if line["kind"] == "train"]
    assert [line["calls/trained"] for line in lines] == [4, 4]
    assert [line["failed"] + line["lost"] + line["damaged"] for line in lines] == [0, 0]
    episodes = stored_episodes(run.store_url)
    assert Counter(call.agent_path for each in episodes for call in each.calls) == {
        "app": len(episodes)
    }
    assert {each.reward for each in episodes} == {0.0}


def test_files_of_a_trial_are_kept_and_found(followed: tuple[Path, str, str]) -> None:
    run = followed[0] / "runs/harbor"
    episode = stored_episodes(RunFolder(run).store_url)[0]
    trials = run.resolve() / "trials" / episode.attempt_id
    text = inspect_run(run, episode.rollout_id)
    assert f"stdout: files: {trials}\n" in text
    assert f"stdout: trajectory: {trials}/agent/trajectory.json\n" in text
    assert (trials / "agent/trajectory.json").is_file()
    assert (trials / "verifier/test-stdout.txt").is_file()


async def test_the_page_shows_where_the_files_of_a_trial_are(
    followed: tuple[Path, str, str],
) -> None:
    run = followed[0] / "runs/harbor"
    episode = stored_episodes(RunFolder(run).store_url)[0]
    trials = run.resolve() / "trials" / episode.attempt_id
    async with serving(run.parent) as client:
        rollout = await client.get(f"/runs/harbor/rollouts/{episode.rollout_id}", RolloutDetail)
    [span] = [span for span in rollout.spans if span.name == "harbor sandboxes:Agent"]
    lines = [f"files: {trials}", f"trajectory: {trials}/agent/trajectory.json"]
    assert span.result.splitlines()[:2] == lines
    output = (trials / "verifier/test-stdout.txt").read_text()
    assert span.result.endswith(f"\nverifier: {output}")


def test_the_dry_run_reports_one_trial(followed: tuple[Path, str, str]) -> None:
    printed = followed[1]
    assert "1 rollout" in printed
    assert "app" in printed


COMMAND = """
{python} -m lightspan.cli harbor suite --agent sandboxes:Agent --environment sandboxes:Folder
--model {model} --python {runners} --val val --folder run --runners 2 --group-size 2
--tasks-per-step 1 --max-tokens 8 --option side=small --option sub=planner
--optimize app --frozen base --agents small --agents planner
"""


def test_the_command_trains_the_main_loop_and_resumes(tiny: Path, tmp_path: Path) -> None:
    """Check calls of a side model and of a sub-agent that a header names: they are not trained."""
    write_suite(tmp_path / "suite", "ab", "echo 1")
    write_suite(tmp_path / "val", "c", "echo 1")
    shutil.copy(SANDBOXES / "sandboxes.py", tmp_path)
    command = COMMAND.format(python=sys.executable, model=tiny, runners=PYTHON).split()
    printed, progress = "", ""
    for more in (["--steps", "1"], ["--steps", "2", "--resume"]):
        done = subprocess.run(
            [*command, *more], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        printed, progress = done.stdout, done.stderr
    assert "held-out reward: 1.00 -> 1.00" in printed
    assert "step 2/2" in progress
    assert "step 1/2" not in progress
    run = RunFolder(tmp_path / "run")
    lines = [line for line in run.metrics() if line["kind"] == "train"]
    assert [(line["step"], line["calls/trained"]) for line in lines] == [(1, 2), (2, 2)]
    episodes = [each for each in stored_episodes(run.store_url) if each.mode is Mode.TRAIN]
    calls = [call for each in episodes for call in each.calls]
    assert Counter((call.agent_path, call.policy) for call in calls) == {
        ("app", "policy"): 4,
        ("small", "base"): 4,
        ("planner", "base"): 4,
    }
    assert {each.reward for each in episodes} == {1.0}


STOPPED = """
import sys
from lightspan import LightningRL, LocalRunners, Trainer
from lightspan_harbor import HarborTasks, trial

if __name__ == "__main__":
    model, python, suite = sys.argv[1:]
    app = trial(
        agent="sandboxes:Agent", environment="sandboxes:Folder", options={"forever": True}
    )
    algorithm = LightningRL(model, group_size=2, tasks_per_step=1)
    Trainer(algorithm, runners=LocalRunners(2, python=python), folder="run").fit(
        app, HarborTasks(suite)
    )
"""


def test_ctrl_c_leaves_no_sandbox(tiny: Path, tmp_path: Path) -> None:
    """Check a training whose process group gets SIGINT, as from a terminal."""
    write_suite(tmp_path / "suite", "a", "echo 1")
    shutil.copy(SANDBOXES / "sandboxes.py", tmp_path)
    (tmp_path / "train.py").write_text(STOPPED)
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    with (tmp_path / "log").open("wb") as log:
        training = subprocess.Popen(
            [sys.executable, "train.py", str(tiny), PYTHON, str(tmp_path / "suite")],
            cwd=tmp_path,
            env={**os.environ, "SANDBOXES": str(boxes)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while len(list(boxes.glob("*/app/answer.txt"))) < 2:
        assert training.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    os.killpg(training.pid, signal.SIGINT)
    assert training.wait() != 0
    while list(boxes.iterdir()):  # the test's time limit ends this loop
        time.sleep(0.1)


def reflects(request: Any) -> str:
    text = request.last_text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
    return f"I think so.\n<prompt>\nBRIEF {text.strip()}\n</prompt>"


LEARNED = {"rules": "AGENTS.md", "habits": "skill", "role": "option:config.system"}
"""Prompts and their places."""


def test_gepa_learns_a_file_a_skill_and_a_system_prompt(tmp_path: Path) -> None:
    """Check that candidates reach the agent, and that the verifier's output is shown.

    The reward is the share of the prompts that begin with "BRIEF".
    """
    check = "awk '/^BRIEF/ {n++} END {print n / 3}' instructions.txt"
    train = write_suite(tmp_path / "train", "abcd", check)
    val = write_suite(tmp_path / "val", "xy", check)
    app = trial(
        agent="sandboxes:Reader",
        model="openai/none",
        environment="sandboxes:Folder",
        prompts=LEARNED,
    )
    with ScriptedServer(reflects) as thinker:
        algorithm = GEPA(
            {name: PromptTemplate(f"Be good at {name}.") for name in LEARNED},
            LLM(base_url=thinker.url, model="thinker"),
            max_rollouts=32,
            minibatch=2,
            significance=None,
        )
        trainer = Trainer(
            algorithm, runners=runners(), folder=tmp_path / "run", reporter=SilentReporter()
        )
        result = trainer.fit(app, train, val)
        asked = "".join(request.last_text for request in thinker.requests)
    assert [evaluation.mean for evaluation in result.evaluations] == [0.0, 1.0]
    assert {name: prompt.template for name, prompt in result.prompts.items()} == {
        name: f"BRIEF Be good at {name}." for name in LEARNED
    }
    assert "verifier: checked" in asked


COUNT = '{all += length; gsub(/[^a-z]/, ""); few += length} END {print all ? few / all : 0}'
LETTERS = f"LC_ALL=C awk '{COUNT}' answer.txt"


def test_the_reward_of_trials_rises(tiny: Path, tmp_path: Path) -> None:
    """Check that a model learns what a verifier rewards: the share of lower-case letters."""
    tasks = write_suite(tmp_path / "suite", "ab", LETTERS)
    val = write_suite(tmp_path / "val", "xyzw", LETTERS)
    app = trial(agent="sandboxes:Agent", environment="sandboxes:Folder")
    algorithm = LightningRL(
        tiny, group_size=8, tasks_per_step=2, learning_rate=1e-2, max_tokens=6, timeout_s=None
    )
    options: dict[str, Any] = {"steps": 20, "folder": tmp_path / "run", "validate_every": 20}
    trainer = Trainer(algorithm, runners=runners(4), reporter=SilentReporter(), **options)
    result = trainer.fit(app, tasks, val)
    before, after = (evaluation.mean for evaluation in result.evaluations)
    assert after > before + 0.2
