"""Runner processes: started, fed, replaced, ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import AppError, ConfigError, LightspanError
from lightspan.execution import RunnerPlan, Runners
from lightspan.execution.local import LocalRunners
from lightspan.records import (
    AttemptStatus,
    Mode,
    Outcome,
    Reward,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.routing import Routing
from lightspan.store import Store
from lightspan.stores import open_store

HERE = str(Path(__file__).parent)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        yield store


def plan(store: Store, app: str, **fields: Any) -> RunnerPlan:
    return RunnerPlan(store_url=store.url, app=app, sys_path=[HERE], **fields)


async def enqueue(store: Store, tasks: list[Any], **fields: Any) -> None:
    await store.enqueue(
        [
            Rollout(rollout_id=f"ro-{n}", task=task, task_id=f"t{n}", mode=Mode.VAL, **fields)
            for n, task in enumerate(tasks)
        ]
    )


async def finished(store: Store, runners: LocalRunners) -> list[RolloutState]:
    while True:
        states = await store.rollouts()
        if all(state.status.final for state in states):
            return states
        runners.check()
        await asyncio.sleep(0.02)


@asynccontextmanager
async def started(runners: LocalRunners, plan: RunnerPlan) -> AsyncIterator[LocalRunners]:
    assert isinstance(runners, Runners)
    await runners.start(plan)
    try:
        yield runners
    finally:
        await runners.stop()
        await runners.stop()


@pytest.mark.parametrize(("slots", "processes"), [(8, 1), (5, 2)])
async def test_processes_share_the_work(store: Store, slots: int, processes: int) -> None:
    await enqueue(store, [{"seconds": 0.01}] * 30)
    made = LocalRunners(slots, processes=processes)
    async with started(made, plan(store, "runner_apps:sleeps")) as runners:
        pids = runners.pids
        states = await finished(store, runners)
    assert {state.status for state in states} == {RolloutStatus.SUCCEEDED}
    attempts = await store.attempts([f"ro-{n}" for n in range(30)])
    found = {int(a.reward.value) for a in attempts if a.reward and a.reward.value}
    assert found <= set(pids)
    assert len(pids) == processes
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_every_attempt_its_process(store: Store) -> None:
    """With the call token in the environment, and children allowed."""
    resources = await store.put_resources({"routing": Routing(gateway_url="http://127.0.0.1:9")})
    await enqueue(store, [{}, {}], resources_id=resources)
    made = LocalRunners(2, isolation="process")
    async with started(made, plan(store, "runner_apps:shows_environment")) as runners:
        assert len(runners.pids) == 2
        await finished(store, runners)
    attempts = await store.attempts(["ro-0", "ro-1"])
    assert [(attempt.message, attempt.status) for attempt in attempts] == [
        ("", AttemptStatus.SUCCEEDED)
    ] * 2


async def test_a_stuck_process_is_replaced(store: Store) -> None:
    """A sync app that never returns costs its process, not the run; time and again."""
    await enqueue(store, [{"seconds": 600}] * 3 + [{"seconds": 0}], timeout_s=0.3)
    async with started(LocalRunners(1), plan(store, "runner_apps:sleeps")) as runners:
        first = runners.pids
        states = await finished(store, runners)
        assert runners.pids != first
    failed, succeeded = RolloutStatus.FAILED, RolloutStatus.SUCCEEDED
    assert [state.status for state in states] == [failed, failed, failed, succeeded]
    attempts = await store.attempts([f"ro-{n}" for n in range(3)])
    assert [attempt.outcome for attempt in attempts] == [Outcome.TIMEOUT] * 3


async def test_a_process_that_dies_is_replaced(store: Store, tmp_path: Path) -> None:
    """Its one attempt uses up a try, and the next one succeeds."""
    await enqueue(store, [{"marker": str(tmp_path / "died")}])
    async with started(LocalRunners(1), plan(store, "runner_apps:kills_itself")) as runners:
        [state] = await finished(store, runners)
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.SUCCEEDED, 1)
    lost, done = await store.attempts(["ro-0"])
    assert (lost.status, lost.message) == (AttemptStatus.LOST, "the runner's process died")
    assert done.reward == Reward(1.0)


async def test_processes_that_keep_dying(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan.execution.local.MAX_QUICK_DEATHS", 2)
    await enqueue(store, [{"marker": "/nowhere/at/all"}])
    dying = "runner_apps:dies"
    async with started(LocalRunners(1), plan(store, dying)) as runners:
        with pytest.raises(LightspanError, match=r"died 2 times .* \(last exit code -9\)"):
            await finished(store, runners)


@pytest.mark.parametrize(
    ("app", "message"),
    [
        (
            "no_such_module:app",
            "the app 'no_such_module:app' cannot be imported: ModuleNotFoundError",
        ),
        ("runner_apps:nothing", "the app 'runner_apps:nothing' cannot be found"),
        ("runner_apps:not_callable", "an app must be callable, not int: 5"),
        ("runner_apps", "an app is named module:name, not 'runner_apps'"),
    ],
)
async def test_apps_that_cannot_be_had(store: Store, app: str, message: str) -> None:
    with pytest.raises(AppError, match=message):
        await LocalRunners(2, processes=2).start(plan(store, app))


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="at least one slot and process, not 0, 1"):
        LocalRunners(0)
    with pytest.raises(ConfigError, match='"thread" or "process", not \'cage\''):
        LocalRunners(1, isolation="cage")
