"""Fixtures of tests with a real Ray cluster on this machine: a head and a node, with a token."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

# Before Ray is loaded, which reads them once; and no test reads a developer's token.
TOKEN = secrets.token_hex(16)
_folder = tempfile.TemporaryDirectory(prefix="lightspan-tests-")
_file = Path(_folder.name, "token")
_file.write_text(TOKEN)
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(_file)}
for _name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
    os.environ.pop(_name, None)
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}

from serve_process import serving_store  # type: ignore[import-not-found]  # noqa: E402

from lightspan.stores import open_store  # noqa: E402
from lightspan.stores.protocol import Store  # noqa: E402
from tests.conftest import APPS, apps, questions, rl  # noqa: E402, F401 - fixtures
from tests.ray_nodes.nodes import Cluster, Node  # noqa: E402

TRAINER, RUNNER = "a-trainer-key-0123456789", "a-runner-key-0123456789"
HERE = str(Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failure."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Run a cluster that tests share, whose nodes have the runners' key."""
    with Cluster(LIGHTSPAN_STORE_KEY=RUNNER) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def node(cluster: Cluster) -> Node:
    """Return a node that no test kills."""
    node = cluster.add(cpus=4)
    node.wait_ready()
    return node


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a store, and set the trainer's key in this process; yield the store's URL."""
    keys = ("--trainer-key-env", "TRAINER", "--runner-key-env", "RUNNER")
    file = f"sqlite:///{tmp_path}/served.db"
    with serving_store(file, *keys, TRAINER=TRAINER, RUNNER=RUNNER) as (url, _):
        monkeypatch.setenv("LIGHTSPAN_STORE_KEY", TRAINER)
        yield url


@pytest.fixture
async def store(served: str) -> AsyncIterator[Store]:
    async with open_store(served) as store:
        yield store
