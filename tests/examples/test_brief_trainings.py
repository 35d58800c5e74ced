"""Run each example's training from its data to its report, too briefly to learn anything.

The numbers of its web page are those that `lightspan inspect` prints.

`nox -s "examples(math)"`, the quickstart and CI's short run of the router check that it learns.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.reports.ui_numbers import check_run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
@pytest.mark.timeout(1800)  # the quest took 400 s beside a load of 4
@pytest.mark.parametrize("example", ["math", "quest", "rag", "sql"])
def test_the_command_trains(example: str, tmp_path: Path) -> None:
    if find_spec(f"{example}_example") is None:
        pytest.skip(f"the example {example} is in an environment of its own")
    command = [sys.executable, str(EXAMPLES / example / "train.py")]
    command += ["--demonstrations", "100", "--steps", "1", "--held-out", "8", "--runners", "8"]
    command += ["--validate-every", "0", "--folder", str(tmp_path / "run")]
    command += ["--cache", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "imitated 100 demonstrations" in done.stdout
    assert "(n=8" in done.stdout.splitlines()[-1], "what it gained"

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if step["kind"] == "train"]
    assert [step["step"] for step in steps] == [1]
    assert all(step["calls"] > 0 for step in steps)
    evaluations = sorted((tmp_path / "run" / "evaluations").glob("step-*.json"))
    assert [len(json.loads(path.read_text())["rewards"]) for path in evaluations] == [8, 8]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    asyncio.run(check_run(tmp_path / "run"))
