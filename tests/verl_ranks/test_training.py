"""Real trainings by verl that the trainer starts itself, on two ranks of the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightspan_testing.tiny import tiny_model

SCRIPT = Path(__file__).parents[1] / "apps" / "train_verl.py"
STEPS = 20
LATEST_S = 900.0

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("verl") / "model", seed=3, hidden=64)


@contextmanager
def training(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """The script as a process. What it started is gone after it, however it ended."""
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, arguments)]
    with folder.with_suffix(".log").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        started = [] if process.poll() is not None else psutil.Process(process.pid).children(True)
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, "processes outlive the trainer"


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """In their order; Ray's workers bear their class's name."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = child.cmdline()
            if "lightspan_verl.rank_main" in line or "ray::RayRank" in " ".join(line):
                found.append((int(child.environ()["RANK"]), child))
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


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


@pytest.mark.parametrize("more", [(), ("--lora",), ("--ray",)], ids=["whole", "lora", "ray"])
def test_the_held_out_reward_rises_though_a_rank_is_killed(
    python: str, model: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """The first life ends with the rank's name, and the second goes on from the checkpoint, on
    another number of ranks; with Ray the second has processes of the trainer's own."""
    folder = tmp_path / "run"
    log = folder.with_suffix(".log")
    with training(folder, model, python, 2, STEPS, *more) as process:
        until(lambda: steps_of(folder) >= 2, process, log)
        first, second = ranks_of(process)
        os.kill(second.pid, signal.SIGKILL)
        assert process.wait(LATEST_S) != 0
        psutil.wait_procs([first, second], timeout=60)
        assert not first.is_running()
    assert f"verl's rank 1 (cpu), process {second.pid}, " in log.read_text()
    in_ray = "--ray" in more
    assert ("has died; Ray says" if in_ray else "was ended by SIGKILL") in log.read_text()
    assert ("on this machine" in log.read_text()) == in_ray
    again = [each for each in more if each != "--ray"]
    with training(folder, model, python, 1, STEPS, *again, "--resume") as process:
        assert process.wait(LATEST_S) == 0, log.read_text()[-4000:]
    text = log.read_text()
    assert "resuming" in text
    lines = lines_of(folder)
    evaluations = [line["mean"] for line in lines if line["kind"] == "eval"]
    assert evaluations[-1] > evaluations[0] + 0.1, text[-2000:]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    gap = "learner/logprob_gap_mean"
    assert max(line[gap] for line in lines if gap in line) < 1e-4
    assert (folder / "model").is_dir()


@pytest.mark.parametrize("more", [(), ("--ray",)], ids=["processes", "ray"])
def test_a_killed_trainer_leaves_no_ranks(
    python: str, model: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Nor anything else: with Ray, no cluster."""
    folder = tmp_path / "run"
    with training(folder, model, python, 2, STEPS, *more) as process:
        until(lambda: steps_of(folder) >= 1, process, folder.with_suffix(".log"))
        assert len(ranks_of(process)) == 2
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
