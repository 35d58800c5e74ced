"""Test trainings by verl that the trainer starts itself, on two ranks of the CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from lightspan_testing.tiny import tiny_model
from tests.vllm_servers.scripts import LATEST_S, lines_of, steps_of, training, until

SCRIPT = Path(__file__).parents[1] / "apps" / "train_verl.py"
STEPS = 20

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("verl") / "model", seed=3, hidden=64)


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes of the ranks in order."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "lightspan_verl.rank_main" in child.cmdline():
                found.append((int(child.environ()["RANK"]), child))
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


@pytest.mark.parametrize("more", [(), ("--lora",)], ids=["whole", "lora"])
def test_the_held_out_reward_rises_though_a_rank_is_killed(
    python: str, model: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Check that the first process ends with the killed rank's name, and the run can be resumed.

    It is resumed on another number of ranks.
    """
    folder = tmp_path / "run"
    log = folder.with_suffix(".log")
    with training(SCRIPT, folder, model, python, 2, STEPS, *more) as process:
        until(lambda: steps_of(folder) >= 2, process, log)
        first, second = ranks_of(process)
        os.kill(second.pid, signal.SIGKILL)
        assert process.wait(LATEST_S) != 0
        psutil.wait_procs([first, second], timeout=60)
        assert not first.is_running()
    ended = f"verl's rank 1 (cpu), process {second.pid}, was ended by SIGKILL"
    assert ended in log.read_text()
    with training(SCRIPT, folder, model, python, 1, STEPS, *more, "--resume") as process:
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


def test_no_process_is_left(python: str, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with training(SCRIPT, folder, model, python, 2, STEPS) as process:
        until(lambda: steps_of(folder) >= 1, process, folder.with_suffix(".log"))
        assert len(ranks_of(process)) == 2
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
