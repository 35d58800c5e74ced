"""A runner process whose store server cannot be reached when the process starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import StoreError, StoreUnreachableError
from lightspan.runners import process_main
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.runners.timings import RunnerTimings
from lightspan.schema.records import RolloutStatus
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_testing.wait import until
from packages.core.tests.runners.test_local import enqueue, finished, plan, started
from packages.gateway.tests.remote_store.served import serving


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


class Ended(BaseException):
    """The process has ended for this reason."""


class Parent:
    def __init__(self, *, has_ended: bool = False) -> None:
        self.has_ended = asyncio.Event()
        if has_ended:
            self.has_ended.set()

    def end(self, reason: str | None) -> None:
        raise Ended(reason)


async def opened(plan: RunnerPlan, **options: bool) -> Store | None:
    parent: Any = Parent(**options)
    return await process_main.open_plan_store(plan, parent)


def away(**fields: Any) -> RunnerPlan:
    return RunnerPlan(store_url="http://127.0.0.1:9", app="runner_apps:sleeps", **fields)


async def test_after_a_lease_another_process_may_try() -> None:
    timings = RunnerTimings(quick_death_s=1.0)
    with pytest.raises(Ended, match=r"^it could not open the store for \d+ s: store http://127"):
        await opened(away(lease_s=0.5, timings=timings))


async def test_who_is_to_end_does_not_wait() -> None:
    assert await opened(away(), has_ended=True) is None


async def test_what_will_not_pass_is_not_waited_for(tmp_path: Path) -> None:
    """The process dies at once, which counts as a quick death."""
    (tmp_path / "run.db").write_text("no database " * 1000)
    broken = RunnerPlan(store_url=f"sqlite:///{tmp_path}/run.db", app="runner_apps:sleeps")
    with pytest.raises(StoreError) as raised:
        await opened(broken)
    assert not isinstance(raised.value, StoreUnreachableError)
