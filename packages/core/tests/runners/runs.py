"""Helpers that run apps with one runner in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lightspan.runners.app import App
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import Runner
from lightspan.schema.records import Attempt, Mode, Rollout, RolloutState, RolloutStatus
from lightspan.schema.routing import Route, Rule, Target
from lightspan.schema.spans import Span
from lightspan.stores.protocol import Store


def load(name: str) -> Any:
    """Import a file of apps beside this one by the name that runners know it by."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


apps = load("runner_apps")
WRITER = Rule("writer", Target(route=Route.POLICY, policy="policy"))


async def enqueue(
    store: Store, tasks: list[Any], resources: dict[str, Any] | None = None, **fields: Any
) -> None:
    resources_id = await store.put_resources(resources) if resources else ""
    defaults = {"resources_id": resources_id, "mode": Mode.VAL}
    await store.enqueue(
        [
            Rollout(rollout_id=f"ro-{n}", task=task, task_id=f"t{n}", **{**defaults, **fields})
            for n, task in enumerate(tasks)
        ]
    )


@asynccontextmanager
async def running(store: Store, app: Any, **config: Any) -> AsyncIterator[Runner]:
    runner = Runner(store, app if isinstance(app, App) else App(app), RunnerConfig(**config))
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        runner.stop()
        await task


async def finished(store: Store) -> list[RolloutState]:
    cursor = 0
    while True:
        states = await store.rollouts()
        if all(state.status.final for state in states):
            return states
        cursor = (await store.watch(cursor, timeout_s=5)).cursor


async def reaches(store: Store, status: RolloutStatus, number: int = 1) -> None:
    while True:
        if (await store.count()).get(status, 0) >= number:
            return
        await asyncio.sleep(0.002)


async def run_one(store: Store, app: Any, task: Any, **config: Any) -> Attempt:
    """Run one rollout and return its attempt."""
    await enqueue(store, [task])
    async with running(store, app, **config):
        await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    return attempt


async def spans_of(store: Store, attempt: Attempt) -> list[Span]:
    return (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
