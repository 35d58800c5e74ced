"""Test trainings on vLLM servers that the trainer starts itself."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lightspan_vllm.weights import PREFIX
from tests.vllm_servers.scripts import LATEST_S, lines_of, steps_of, training, until

SCRIPT = Path(__file__).parents[1] / "apps" / "train_vllm.py"
STEPS = 10

pytestmark = pytest.mark.timeout(1500)


def servers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return a trainer's server processes: those that listen, then their child processes."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("vllm.entrypoints" in word for word in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def left_behind(parent: Path) -> list[Path]:
    """Return the folders of weights that were left."""
    return list(parent.glob(f"{PREFIX}*"))


@pytest.mark.parametrize(
    ("more", "said_in"),
    [((), "vllm-policy-0.log"), (("--lora",), "vllm-checker+writer-0.log")],
    ids=["whole", "lora"],
)
def test_the_held_out_reward_rises_though_a_server_is_killed(
    served: Path, python: str, tmp_path: Path, more: tuple[str, ...], said_in: str
) -> None:
    """Check that with LoRA both policies of a killed server are restored."""
    folder = tmp_path / "run"
    log = folder.with_suffix(".log")
    with training(SCRIPT, folder, served, python, STEPS, *more) as process:
        until(lambda: steps_of(folder) >= 3, process, log)
        engine = next(each for each in servers_of(process) if "EngineCore" in each.name())
        engine.send_signal(signal.SIGKILL)
        process.wait(LATEST_S)
    text = log.read_text()
    assert process.returncode == 0, text[-4000:]
    assert "is lost" in text
    evaluations = [line for line in lines_of(folder) if line["kind"] == "eval"]
    first, last = evaluations[0]["mean"], evaluations[-1]["mean"]
    assert last > first + 0.1, text[-2000:]
    assert steps_of(folder) == STEPS
    gap = "learner/logprob_gap_mean"
    assert max(line[gap] for line in lines_of(folder) if gap in line) < 1e-4
    (log_of_server,) = folder.glob("vllm-*.log")
    assert log_of_server.name == said_in
    said = log_of_server.read_text()
    assert said.count("Application startup complete") == 2
    assert left_behind(tmp_path) == []


def test_kill_9_leaves_no_server_and_resumes(served: Path, python: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log = folder.with_suffix(".log")
    with training(SCRIPT, folder, served, python, 1000) as process:
        until(lambda: steps_of(folder) >= 1, process, log)
        servers = servers_of(process)
        assert len(servers) >= 3
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(servers, timeout=60)
        assert not alive
    done = steps_of(folder)
    assert len(left_behind(tmp_path)) == 1, "the killed trainer's weights"
    with training(SCRIPT, folder, served, python, done + 1, "--resume") as process:
        process.wait(LATEST_S)
    assert process.returncode == 0, log.read_text()[-4000:]
    assert steps_of(folder) == done + 1
    assert left_behind(tmp_path) == []
