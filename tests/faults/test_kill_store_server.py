"""Test a store's server that is killed repeatedly: nothing is lost, nothing is stored twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fault_store  # type: ignore[import-not-found]
import pytest

from packages.core.tests.stores.lives import check_once, live

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SEED = os.environ.get("LIGHTSPAN_SEED", "")
KILLS = 15 if SEED else 5


class Undying:
    """A server that is started again whenever it dies.

    Args:
        store: file of the store.
        point: where it kills itself: `before` the operation, or `after` its commit.
        seed: seed of the requests at which it kills itself.
    """

    def __init__(self, store: Path, point: str, seed: int) -> None:
        self._store = store
        self._point = point
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._port = "0"
        self.deaths = 0
        self.process = self._started()
        self._thread = threading.Thread(target=self._revive)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def end(self) -> None:
        self._over.set()
        self.process.kill()
        self._thread.join()

    def _started(self) -> subprocess.Popen[str]:
        number = str(self._random.randint(1, 6)) if self.deaths < KILLS else "0"
        command = [sys.executable, fault_store.__file__, str(self._store)]
        process = subprocess.Popen(
            [*command, self._port, self._point, number], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said, "the server did not start"
        self._port = said.strip().rpartition(":")[2]
        return process

    def _revive(self) -> None:
        while True:
            status = self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            if self._over.is_set():
                return
            assert status == -signal.SIGKILL
            self.deaths += 1
            self.process = self._started()


@contextmanager
def undying(store: Path, point: str, seed: int) -> Iterator[Undying]:
    server = Undying(store, point, seed)
    try:
        yield server
    finally:
        server.end()


@pytest.mark.parametrize("point", ["before", "after"])
def test_a_server_killed_around_the_commit(tmp_path: Path, point: str) -> None:
    with undying(tmp_path / "store.db", point, seed=int(SEED or "0")) as server:
        asyncio.run(live(server.url))
        assert server.deaths == KILLS
        asyncio.run(check_once(server.url))
