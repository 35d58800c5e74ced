"""Test runner processes that are drained."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightspan.schema.records import RolloutStatus
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_cluster.joined_runners import JoinedRunners
from lightspan_testing.wait import until
from packages.core.tests.runners.runs import rollout, runners_of


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        yield store


async def test_a_process_that_dies_while_runners_are_drained(store: Store, tmp_path: Path) -> None:
    """Check that its attempts are requeued at once, before their leases end."""
    both = [rollout(number, "neighbour", tmp_path) for number in (1, 2)]
    await store.enqueue(both)
    async with runners_of(store, "crashes", slots=2, lease_s=3600, kind=JoinedRunners) as runners:
        for number in (1, 2):
            await until((tmp_path / f"marker-{number}").exists)
        await until(lambda: runners.running == 2)
        [pid] = runners.pids
        draining = asyncio.create_task(runners.drain())
        await until(lambda: runners._supervisor is None)
        os.kill(pid, signal.SIGKILL)
        await draining
        states = await store.rollouts()
    assert [(state.status, state.infrastructure_tries) for state in states] == [
        (RolloutStatus.QUEUED, 0)
    ] * 2
