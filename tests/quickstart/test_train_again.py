"""Test `train.py` with LoRA after the quickstart, whose warm start it uses: killed and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, str(ROOT / "examples/sql/train.py"), "--held-out", "10"]


def _train(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [*TRAIN, "--folder", str(folder), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _kill_after(process: subprocess.Popen[str], line: str, number: signal.Signals) -> str:
    """Send a signal when a line begins with `line`; return the output after it.

    Checks that no runner process is left.
    """
    assert process.stdout is not None
    seen = []
    for text in process.stdout:
        seen.append(text)
        if text.startswith(line):
            break
    else:
        pytest.fail(f"never printed {line!r}: {''.join(seen)}")
    time.sleep(1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(process.pid, number)
    rest, _ = process.communicate()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    return rest


def _steps(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["kind"] == "train"]


@pytest.mark.timeout(300)
def test_adapters_resume_after_ctrl_c_and_after_kill(tmp_path: Path) -> None:
    """Check `--lora`; the fault tests check whole weights."""
    folder = tmp_path / "run"
    first = _train(folder, "--lora", "--steps", "2")
    rest = _kill_after(first, "step 1/2 ", signal.SIGINT)
    assert first.returncode == 130
    assert f"stopped; {folder} keeps step-00000" in rest
    assert "Task was destroyed" not in rest
    assert "Traceback" not in rest
    second = _train(folder, "--lora", "--steps", "2", "--resume")
    _kill_after(second, "step 2/2 ", signal.SIGKILL)
    assert second.returncode == -signal.SIGKILL
    third = _train(folder, "--lora", "--steps", "2", "--resume")
    printed, _ = third.communicate()
    assert third.returncode == 0, printed
    assert printed.splitlines()[-1].startswith("held-out execution accuracy: ")
    assert _steps(folder) == [1, 2]
    peak = re.search(r"peak memory: ([\d.]+) GiB", printed)
    assert peak is not None
    assert float(peak[1]) < 3
    config = json.loads((folder / "config.json").read_text())
    assert config["lora"]["rank"] == 16
    assert (folder / "model/adapter_model.safetensors").is_file()
