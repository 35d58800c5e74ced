"""Test a runner process that cannot reach the store's server when it starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lightspan.runners.local import LocalRunners
from lightspan.schema.records import RolloutStatus
from lightspan.stores import open_store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_testing.wait import until
from packages.core.tests.runners.test_local import enqueue, finished, plan, started
from packages.gateway.tests.remote_store.served import serving

pytestmark = pytest.mark.slow


async def test_it_waits_for_the_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = ""

    def is_waiting() -> bool:
        nonlocal output
        output += capfd.readouterr().err
        return "waiting for the store: store http://127.0.0.1:" in output

    with serving(lambda: SQLiteStore(tmp_path / "run.db")) as served:
        store = open_store(served.url)
        port = await asyncio.to_thread(served.stop)
        async with started(LocalRunners(1), plan(store, "runner_apps:sleeps")) as runners:
            [pid] = runners.pids
            await until(is_waiting)
            await asyncio.to_thread(served.start, port)
            async with store:
                await enqueue(store, [{"seconds": 0}])
                [state] = await finished(store, runners)
            assert (state.status, runners.pids) == (RolloutStatus.SUCCEEDED, [pid])
