"""`LocalRunners` pass the suite of runners."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import Runners
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_testing.runners_suite import RunnersSuite


class TestLocal(RunnersSuite):
    @pytest.fixture
    def runners(self) -> Runners:
        return LocalRunners(4, processes=2)

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:  # type: ignore[override]
        async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
            yield store
