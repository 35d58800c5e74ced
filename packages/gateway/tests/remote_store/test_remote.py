"""Tests of RemoteStore with the store suite, over a real server with a SQLite file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway.remote_store.store import RemoteStore
from lightspan_testing.store_suite import Clock, StoreSuite
from packages.gateway.tests.remote_store.served import Served


class TestRemoteStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def servers(self, tmp_path: Path) -> Iterator[None]:
        self._folder = tmp_path
        self._servers: dict[str, Served] = {}
        yield
        for served in self._servers.values():
            served.close()

    def make_store(self, name: str, clock: Clock) -> RemoteStore:
        if name not in self._servers:
            path = self._folder / f"{name}.db"
            self._servers[name] = Served(lambda: SQLiteStore(path, clock=clock))
        return RemoteStore(self._servers[name].url)
