"""A database server whose clock is set by an hour, either way, in the middle of leases.

The server is a real one under libfaketime, which reads the hour from a file
(`apt-get install faketime`).
"""

from __future__ import annotations

import asyncio
import glob
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.postgres.cluster import Cluster

from lightspan.schema.records import RolloutStatus
from lightspan.stores.postgres.store import PostgresStore
from lightspan.testing.store_suite import make_rollout, ref

LONG_S = 600.0
SHORT_S = 0.5


class SetClock:
    """A server, and how far its clock is ahead."""

    def __init__(self, cluster: Cluster, file: Path) -> None:
        self.cluster = cluster
        self.url = cluster.url("clock")
        self._file = file

    async def step(self, ahead_s: float) -> None:
        """Set it, and wait until the server goes by that."""
        self._file.write_text(f"{ahead_s:+.0f}")
        while abs(await asyncio.to_thread(self._ahead) - ahead_s) > 60.0:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.05)

    def _ahead(self) -> float:
        with self.cluster.connect() as db:
            [(now,)] = db.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchall()
        return float(now) - time.time()


@pytest.fixture
def server(postgres: Path) -> Iterator[SetClock]:
    found = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
    if not found:
        reason = "no libfaketime here: apt-get install faketime"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the server's user is another one
        file = Path(folder) / "ahead"
        file.write_text("+0")
        environment = {
            "LD_PRELOAD": found[0],
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        with Cluster(postgres, environment=environment) as cluster:
            yield SetClock(cluster, file)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
async def test_live_leases_live_and_dead_ones_end(server: SetClock, step: float) -> None:
    """Over the step, the step back, the restart of a client and that of the server."""
    async with PostgresStore(server.url) as one, PostgresStore(server.url) as other:
        await one.enqueue([make_rollout(f"ro-{number}") for number in range(3)])
        claims = [*await one.claim("a", 1, LONG_S), *await other.claim("b", 1, LONG_S)]
        alive = [ref(claim.attempt) for claim in claims]
        [dead] = await other.claim("dead", 1, SHORT_S)
        for ahead in (step, 0.0, step):
            await server.step(ahead)
            assert await one.heartbeat(alive, LONG_S) == []
            assert await other.heartbeat(alive, LONG_S) == []
            async with PostgresStore(server.url) as new:
                assert await new.heartbeat(alive, LONG_S) == []
        await _ends(other, dead.rollout.rollout_id)
        [dead] = await one.claim("dead", 1, SHORT_S)
        await asyncio.to_thread(server.cluster.restart)
        await server.step(0.0)
        assert await one.heartbeat(alive, LONG_S) == []
        await _ends(one, dead.rollout.rollout_id)
        counts = {RolloutStatus.RUNNING: 2, RolloutStatus.QUEUED: 1}
        assert await other.count() == counts


async def _ends(store: PostgresStore, rollout_id: str) -> None:
    """Wait until the lease of the rollout's attempt ran out."""
    while True:
        await store.expire()
        [state] = await store.rollouts([rollout_id])
        if state.status is RolloutStatus.QUEUED:
            return
        await asyncio.sleep(0.05)
