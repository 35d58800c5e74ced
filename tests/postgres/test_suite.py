"""Run the store suite with PostgresStore, directly and served over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lightspan_cluster.postgres.store import PostgresStore
from lightspan_gateway.remote_store.store import RemoteStore
from lightspan_testing.store_suite import Clock, StoreSuite
from packages.gateway.tests.remote_store.served import Served


class TestPostgresStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def schemas(self, make_url: Callable[..., str]) -> None:
        self._make_url = make_url
        self._urls: dict[str, str] = {}

    def make_store(self, name: str, clock: Clock) -> PostgresStore:
        if name not in self._urls:
            self._urls[name] = self._make_url()
        return PostgresStore(self._urls[name], clock=clock)


@pytest.mark.long
class TestServedPostgres(StoreSuite):
    """Run the suite with one server per client, all on one database."""

    @pytest.fixture(autouse=True)
    def schemas(self, make_url: Callable[..., str]) -> Iterator[None]:
        self._make_url = make_url
        self._urls: dict[str, str] = {}
        self._servers: list[Served] = []
        yield
        for served in self._servers:
            served.close()

    def make_store(self, name: str, clock: Clock) -> RemoteStore:
        if name not in self._urls:
            self._urls[name] = self._make_url()
        url = self._urls[name]
        self._servers.append(Served(lambda: PostgresStore(url, clock=clock)))
        return RemoteStore(self._servers[-1].url)
