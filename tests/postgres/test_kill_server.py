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

from lightspan_cluster.postgres.store import PostgresStore
from packages.core.tests.stores.programs import WRITER, check_acknowledged
from tests.postgres.cluster import Cluster

_IMPATIENT = """
from lightspan_cluster.postgres import writer
writer.RETRY_TIMEOUT_S = 0.0
"""


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
