"""Tests of the gateway with the gateway suite, with stores in memory and in SQLite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_testing.gateway_suite import GatewaySuite


class TestTableInMemory(GatewaySuite):
    @pytest.fixture
    async def store(self) -> AsyncIterator[Store]:
        async with open_store("memory:") as store:
            yield store


class TestTableInSqlite(GatewaySuite):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
            yield store
