"""Test `kill -9` of the PostgreSQL server: acknowledged writes survive."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import StoreUnreachableError
from lightspan.runners.discovery import make_peer
from lightspan.schema.records import PeerRole, RolloutStatus
from lightspan.stores.timings import StoreTimings
from lightspan_cluster.postgres.store import PostgresStore
from lightspan_testing.store_suite import make_rollout
from packages.core.tests.stores.programs import WRITER, check_acknowledged
from tests.postgres.cluster import Cluster

_IMPATIENT = """
from lightspan_cluster.postgres import writer
writer.RETRY_TIMEOUT_S = 0.0
"""


async def test_a_patient_store_waits_for_its_server(postgres: Path) -> None:
    """Check a trainer's patience (`patience_s`): it ends when the store is closed."""
    with Cluster(postgres) as cluster:
        store = PostgresStore(cluster.url("x"), timings=StoreTimings(database_retry_s=0.05))
        store.set_patience(60.0)
        async with store:
            await store.enqueue([make_rollout()])
            await asyncio.to_thread(cluster.kill)
            work = [
                asyncio.create_task(store.enqueue([make_rollout("ro-2")])),
                asyncio.create_task(store.policy_versions("any")),
            ]
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in work)
            await asyncio.to_thread(cluster.start)
            await asyncio.gather(*work)
            assert await store.count() == {RolloutStatus.QUEUED: 2}
            await asyncio.to_thread(cluster.kill)
            waiting = asyncio.create_task(store.enqueue([make_rollout("ro-3")]))
            await asyncio.sleep(0.2)
        with pytest.raises(StoreUnreachableError):
            await waiting


@pytest.mark.slow
async def test_a_server_that_is_gone_does_not_keep_a_runner(postgres: Path, tmp_path: Path) -> None:
    """Check that an idle `lightspan runner` ends at SIGTERM although its database is away."""
    (tmp_path / "plain_app.py").write_text("def answer(task):\n    return 1.0\n")
    with Cluster(postgres) as cluster:
        url = cluster.url("x")
        command = [sys.executable, "-m", "lightspan.cli", "runner", "--store", url]
        async with PostgresStore(url) as store:
            trainer = make_peer("run", PeerRole.TRAINER, "plain_app:answer", run_id="run")
            await store.announce(trainer)
            with subprocess.Popen(  # noqa: ASYNC220
                [*command, "--app-dir", str(tmp_path), "plain_app:answer"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as runner:
                try:
                    assert runner.stdout is not None
                    while "joined training run" not in await asyncio.to_thread(
                        runner.stdout.readline
                    ):
                        assert runner.poll() is None
                    await asyncio.sleep(1.0)
                    await asyncio.to_thread(cluster.kill)
                    await asyncio.sleep(1.0)
                    runner.terminate()
                    assert await asyncio.to_thread(runner.wait, 20.0) == 0
                    assert "ended; attempts claimed: 0" in runner.stdout.read()
                finally:
                    runner.kill()
            await asyncio.to_thread(cluster.start)


@pytest.mark.faults
def test_kill_9_of_all_processes_keeps_what_was_acknowledged(
    postgres: Path, moments: Callable[[Any], random.Random]
) -> None:
    """Kill the server three times at random moments, with two writers each."""
    lines_of_writers: list[list[str]] = []
    with Cluster(postgres) as cluster:
        url = cluster.url("x")
        for turn in range(3):
            lines_of_writers += _write_and_kill(cluster, url, turn, moments(turn).randrange(1, 300))
            cluster.start()
        assert len(lines_of_writers) > 100
        asyncio.run(
            check_acknowledged(lambda clock: PostgresStore(url, clock=clock), lines_of_writers)
        )


def _write_and_kill(cluster: Cluster, url: str, turn: int, lines: int) -> list[list[str]]:
    """Kill the server after one of two writers has printed `lines` lines; return their output."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _IMPATIENT + WRITER, url, f"{turn}-{number}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    first = writers[0].stdout
    assert first is not None
    output = [first.readline() for _ in range(lines)]
    cluster.kill()
    for writer in writers:
        output += writer.communicate()[0].splitlines(keepends=True)
        assert writer.returncode == 0
    return [line.split() for line in output]
