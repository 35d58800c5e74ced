"""Real trainings on vLLM servers that the trainer starts itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightspan_vllm.weights import PREFIX

SCRIPT = Path(__file__).parents[1] / "apps" / "train_vllm.py"
STEPS = 10
LATEST_S = 900.0

pytestmark = pytest.mark.timeout(1500)


@contextmanager
def training(
    folder: Path, model: Path, python: str, steps: int, *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The script as a process. What it started is gone after it, however it ended."""
    log = folder.with_suffix(".log")
    command = [sys.executable, str(SCRIPT), str(folder), str(model), python, str(steps), *more]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        started = [] if process.poll() is not None else psutil.Process(process.pid).children(True)
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, "processes outlive the trainer"


def servers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes of a trainer's servers: what listens first, then what it started."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("vllm.entrypoints" in word for word in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def until(what: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for it, as long as the trainer lives."""
    latest = time.monotonic() + LATEST_S
    while not what():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < latest, log.read_text()[-4000:]
        time.sleep(0.2)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(folder: Path) -> int:
    return max((int(line["step"]) for line in lines_of(folder)), default=0)


def left_behind(parent: Path) -> list[Path]:
    """Folders of weights."""
    return list(parent.glob(f"{PREFIX}*"))


@pytest.mark.parametrize(
    ("more", "said_in"),
    [((), "vllm-policy-0.log"), (("--lora",), "vllm-checker+writer-0.log")],
    ids=["whole", "lora"],
)
def test_the_held_out_reward_rises_though_a_server_is_killed(
    served: Path, python: str, tmp_path: Path, more: tuple[str, ...], said_in: str
) -> None:
    """With LoRA two policies are on the one server, and both come back with it."""
    folder = tmp_path / "run"
    log = folder.with_suffix(".log")
    with training(folder, served, python, STEPS, *more) as process:
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


def test_kill_9_of_the_trainer_leaves_no_server_and_resume_goes_on(
    served: Path, python: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    log = folder.with_suffix(".log")
    with training(folder, served, python, 1000) as process:
        until(lambda: steps_of(folder) >= 1, process, log)
        servers = servers_of(process)
        assert len(servers) >= 3
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(servers, timeout=60)
        assert not alive
    done = steps_of(folder)
    assert len(left_behind(tmp_path)) == 1, "the killed trainer's weights"
    with training(folder, served, python, done + 1, "--resume") as process:
        process.wait(LATEST_S)
    assert process.returncode == 0, log.read_text()[-4000:]
    assert steps_of(folder) == done + 1
    assert left_behind(tmp_path) == []
