"""Fixtures of tests with real verl, whose interpreter is LIGHTSPAN_VERL_PYTHON."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Optimizer
from lightspan_testing.learner_suite import make_call_rows, make_rows
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_verl.workers import Workers

ADAMW = Optimizer(learning_rate=1e-3, max_grad_norm=0.5, weight_decay=0.1, warmup_steps=3)

DECLARED = ("this learner has no critic", "this learner does not train calls under a grammar")
"""Reasons for which the suite may skip, because the learner declares that it lacks a capability."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failure, unless its reason is in `DECLARED`."""
    report = yield
    if report.skipped and not any(each in str(report.longrepr) for each in DECLARED):
        report.outcome = "failed"
        report.longrepr = f"skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def python() -> str:
    """Return the interpreter that has verl."""
    found = os.environ.get("LIGHTSPAN_VERL_PYTHON")
    if not found:
        pytest.fail("set LIGHTSPAN_VERL_PYTHON, or run nox -s tests_verl, which does", False)
    return found


@pytest.fixture(scope="session")
def one(python: str) -> Iterator[Workers]:
    """Start one rank, which learners share."""
    torch.set_num_threads(1)
    workers = Workers(python, ["cpu"])
    yield workers
    workers.end()


@pytest.fixture(scope="session")
def two(python: str) -> Iterator[Workers]:
    """Start two ranks, which learners share."""
    torch.set_num_threads(1)
    workers = Workers(python, ["cpu", "cpu"])
    yield workers
    workers.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("verl") / "model", seed=4, hidden=32)


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[list[Row]]:
    """Return batches of different sizes: 12 rows of 6 rollouts, 8 of 8, 1 of 1, 12 of 6."""
    model = load_model(folder)
    one = make_rows(model, 1, seed=2)
    return [make_rows(model), make_call_rows(model), one, make_rows(model, seed=3)]
