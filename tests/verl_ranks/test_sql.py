"""Test the unchanged SQL example with vLLM servers and verl."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightspan.training.folder import RunFolder
from lightspan.training.statistics import paired_gain

SCRIPT = Path(__file__).parents[2] / "examples" / "sql" / "train.py"


@pytest.mark.timeout(3600)
def test_its_held_out_reward_rises(python: str, tmp_path: Path) -> None:
    """Check that the whole interval of the gain on held-out questions is above zero."""
    vllm = os.environ.get("LIGHTSPAN_VLLM_PYTHON")
    assert vllm, "LIGHTSPAN_VLLM_PYTHON names no interpreter: run `nox -s tests_verl`"
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, str(SCRIPT), "--vllm", vllm, "--verl", python]
    with log.open("w") as said:
        done = subprocess.run(
            [*command, "--folder", str(folder), "--cache", str(tmp_path / "cache")],
            stdout=said,
            stderr=said,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    assert "held-out execution accuracy: " in log.read_text().splitlines()[-1]
    run = RunFolder(folder)
    before, after = run.evaluations()
    gain = paired_gain(before.rewards, after.rewards)
    assert gain.n == 500
    assert gain.low > 0.05  # as the quickstart's test has it
    lines = [line for line in run.metrics() if line["kind"] == "train"]
    assert all(line["failed"] + line["lost"] + line["damaged"] == 0 for line in lines)
    gap = "learner/logprob_gap_mean"
    assert max(line[gap] for line in lines if gap in line) < 1e-4
