"""Test the result of a finished quickstart, whose run's folder is LIGHTSPAN_RUN.

Any machine should reach the lower bound of the gain. The figures themselves are in
docs/evidence/sql.md, measured by benchmarks/learning.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightspan.training.folder import RunFolder
from lightspan.training.statistics import paired_gain
from lightspan_tools.inspect import inspect_run
from tests.reports.ui_numbers import check_run


@pytest.fixture(scope="module")
def run() -> Path:
    """Return the run's folder."""
    return Path(os.environ["LIGHTSPAN_RUN"])


@pytest.fixture(scope="module")
def metrics(run: Path) -> list[dict[str, Any]]:
    """Return all lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_held_out_accuracy_rose(run: Path) -> None:
    before, after = RunFolder(run).evaluations()  # the test is looked at twice
    gain = paired_gain(before.rewards, after.rewards)
    assert gain.n >= 500
    assert gain.low > 0.05  # the gains of ten runs were .19 to .31, give or take .05


def test_the_curve_is_of_other_tasks(run: Path) -> None:
    folder = RunFolder(run)
    on_the_way = folder.evaluations("selection")
    assert len(on_the_way) >= 3, "before, in the middle, and after"
    held_out = set(folder.evaluations()[0].rewards)
    assert not held_out & set(on_the_way[0].rewards)


def test_every_step_is_there_once(metrics: list[dict[str, Any]]) -> None:
    steps = [line["step"] for line in metrics if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))


def test_trained_agents_are_writer_and_rewriter_alone(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert sorted(config["optimize"]) == ["rewrite_query", "write_query"]
    text = inspect_run(run)
    assert "check_query" in text
    assert "frozen" in text
    asyncio.run(check_run(run))  # the web page has the same numbers


def test_model_loads_and_the_folder_is_the_owners(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
