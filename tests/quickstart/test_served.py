"""Test the served run of the quickstart with the unchanged app."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serve_process import serving  # type: ignore[import-not-found]

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.schema.records import fingerprint, task_id
from lightspan.training.folder import RunFolder
from lightspan.training.statistics import paired_gain

CACHE = Path(__file__).parents[2] / "examples/sql/.cache"


@pytest.fixture(scope="module")
def run() -> RunFolder:
    """Return the run's folder."""
    return RunFolder(Path(os.environ["LIGHTSPAN_RUN"]))


@pytest.fixture
def server(run: RunFolder) -> Iterator[str]:
    """Run `lightspan serve` as a process; yield its URL."""
    with serving(run.path) as (url, lines):
        yield url
    assert f'  lightspan.connect("{url}")' in lines, "the one line to change"
    assert any(line.startswith("calls answered: check_query") for line in lines)


@pytest.mark.timeout(300)
def test_the_app_reaches_its_held_out_figure(run: RunFolder, server: str) -> None:
    """Compare rewards with those of the last evaluation, with equal questions and sampling.

    By chance they differ by more than five standard errors once in a million runs. The untrained
    model is at least ten standard errors lower.
    """
    from sql_example import training

    first, last = run.evaluations()
    held_out = run.read_config()["val"]
    tasks = training.load_tasks(CACHE, "test")[: held_out["tasks"]]
    assert fingerprint(list(tasks)) == held_out["fingerprint"]
    try:
        with lightspan.connect(server), ThreadPoolExecutor(16) as pool:
            rewards = list(pool.map(training.answer, tasks))
    finally:
        sdk_instrumentation.uninstall()
        sdk_instrumentation.close()
    reached = {task_id(task): reward for task, reward in zip(tasks, rewards, strict=True)}
    difference = paired_gain(last.rewards, reached)
    assert difference.n == len(tasks)
    five_errors = 5 * (difference.high - difference.low) / (2 * 1.96)
    assert abs(difference.mean) < five_errors, difference
    gain = paired_gain(first.rewards, last.rewards)
    assert five_errors < gain.mean / 2, "far enough from the starting weights to tell"
    answered = usage(server)
    assert set(answered["agents"]) == {"write_query", "check_query", "rewrite_query"}
    assert answered["agents"]["write_query"] == {"policy": len(tasks)}
    assert set(answered["agents"]["rewrite_query"]) == {"policy"}
    assert set(answered["agents"]["check_query"]) == {"base"}, "frozen at the starting weights"
    assert answered["failed"] == 0


def usage(server: str) -> dict[str, Any]:
    """Return the number of answered calls by agent and policy."""
    with urllib.request.urlopen(f"{server}/lightspan/usage", timeout=10) as response:
        found: dict[str, Any] = json.loads(response.read())
    return found
