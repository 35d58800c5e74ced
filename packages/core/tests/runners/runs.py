"""Run apps with one runner in this process, or with runners in new processes."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from lightspan.runners.app import App
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerConfig, RunnerPlan
from lightspan.runners.runner import Runner
from lightspan.schema.records import Attempt, Mode, Rollout, RolloutState, RolloutStatus
from lightspan.schema.routing import Route, Rule, Target
from lightspan.schema.spans import Span
from lightspan.stores.protocol import Store

R = TypeVar("R", bound=LocalRunners)

HERE = Path(__file__).parent


def load(name: str) -> Any:
    """Import a file of apps in this folder under the name by which runners import it."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
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


# --- runner processes whose apps misbehave ----------------------------------------------------
misbehaving_apps = load("misbehaving_apps")
APPS = (HERE / "misbehaving_apps.py").read_text().splitlines()
TIMEOUT_S = 1.0


def where(source: str, function: str) -> str:
    """Return how messages describe the last line of `misbehaving_apps.py` that equals `source`."""
    number = [number for number, line in enumerate(APPS, 1) if line.strip() == source][-1]
    return f"`{source}` at misbehaving_apps.py:{number} in {function}"


def rollout(number: int, kind: str, tmp_path: Path, **fields: Any) -> Rollout:
    """Return rollout `ro-<number>`, whose app writes a marker file.

    The app then waits for the marker files of rollouts 1 and 2.
    """
    task = {
        "kind": kind,
        "marker": f"{tmp_path}/marker-{number}",
        "when": [f"{tmp_path}/marker-1", f"{tmp_path}/marker-2"],
    }
    defaults = {"mode": Mode.VAL, "task_id": f"t{number}"}
    return Rollout(rollout_id=f"ro-{number}", task=task, **{**defaults, **fields})


@asynccontextmanager
async def runners_of(
    store: Store,
    app: str,
    slots: int = 3,
    python: Path | None = None,
    kind: type[R] = LocalRunners,
    **fields: Any,
) -> AsyncIterator[R]:
    own = {} if python is None else {"python": python, "app_dirs": [HERE]}
    runners = kind(slots, **own)
    app = f"misbehaving_apps:{app}"
    plan = RunnerPlan(store_url=store.url, app=app, sys_path=[str(HERE)], grace_s=0.3, **fields)
    await runners.start(plan)
    try:
        yield runners
    finally:
        await runners.stop()


async def until_lease(store: Store, number: int, at: float) -> None:
    """Wait until the lease of rollout `ro-<number>`'s attempt ends at `at` or later."""
    while (await attempt_of(store, number)).lease_until < at:  # noqa: ASYNC110 - in a store
        await asyncio.sleep(0.02)


async def attempt_of(store: Store, number: int) -> Attempt:
    """Return the only attempt of rollout `ro-<number>`."""
    [attempt] = await store.attempts([f"ro-{number}"])
    return attempt
