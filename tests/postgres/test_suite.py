"""PostgresStore against the suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightspan.stores.postgres.store import PostgresStore
from lightspan.testing.store_suite import StoreSuite


class TestPostgresStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def schemas(self, make_url: Callable[..., str]) -> None:
        self._make_url = make_url
        self._urls: dict[str, str] = {}

    def make_store(self, name: str, clock: Callable[[], float]) -> PostgresStore:
        if name not in self._urls:
            self._urls[name] = self._make_url()
        return PostgresStore(self._urls[name], clock=clock)
