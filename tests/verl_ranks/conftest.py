"""Real verl, of the interpreter that LIGHTSPAN_VERL_PYTHON names."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
import torch

from lightspan_verl.local_ranks import Workers

DECLARED = ("this learner has no critic", "this learner does not train calls under a grammar")
"""What the learner's capabilities say that it cannot; the suite then skips."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip is a failure, but for what is declared."""
    report = yield
    if report.skipped and not any(each in str(report.longrepr) for each in DECLARED):
        report.outcome = "failed"
        report.longrepr = f"skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter that has verl."""
    found = os.environ.get("LIGHTSPAN_VERL_PYTHON")
    if not found:
        pytest.fail("set LIGHTSPAN_VERL_PYTHON, or run nox -s tests_verl, which does", False)
    return found


@pytest.fixture(scope="session")
def one(python: str) -> Iterator[Workers]:
    """One rank, which learners share."""
    torch.set_num_threads(1)
    workers = Workers(python, ["cpu"])
    yield workers
    workers.end()


@pytest.fixture(scope="session")
def two(python: str) -> Iterator[Workers]:
    """Two ranks, which learners share."""
    torch.set_num_threads(1)
    workers = Workers(python, ["cpu", "cpu"])
    yield workers
    workers.end()
