"""Helpers for tests of apps that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import Attempt, Mode, Rollout
from lightspan.stores.protocol import Store
from packages.core.tests.runners.runs import load

HERE = Path(__file__).parent
apps = load("misbehaving_apps")
APPS = (HERE / "misbehaving_apps.py").read_text().splitlines()
TIMEOUT_S = 1.0


def where(source: str, function: str) -> str:
    """Return how a message names the last line of the apps with this source."""
    number = [number for number, line in enumerate(APPS, 1) if line.strip() == source][-1]
    return f"`{source}` at misbehaving_apps.py:{number} in {function}"


def rollout(number: int, kind: str, tmp_path: Path, **fields: Any) -> Rollout:
    """Return a rollout that writes its marker and waits for those of two neighbours."""
    task = {
        "kind": kind,
        "marker": f"{tmp_path}/marker-{number}",
        "when": [f"{tmp_path}/marker-1", f"{tmp_path}/marker-2"],
    }
    defaults = {"mode": Mode.VAL, "task_id": f"t{number}"}
    return Rollout(rollout_id=f"ro-{number}", task=task, **{**defaults, **fields})


@asynccontextmanager
async def runners_of(
    store: Store, app: str, slots: int = 3, python: Path | None = None, **fields: Any
) -> AsyncIterator[LocalRunners]:
    own = {} if python is None else {"python": python, "app_dirs": [HERE]}
    runners = LocalRunners(slots, **own)
    app = f"misbehaving_apps:{app}"
    plan = RunnerPlan(store_url=store.url, app=app, sys_path=[str(HERE)], grace_s=0.3, **fields)
    await runners.start(plan)
    try:
        yield runners
    finally:
        await runners.stop()


async def until_lease(store: Store, number: int, at: float) -> None:
    """Wait until an attempt's lease lasts that long."""
    while (await attempt_of(store, number)).lease_until < at:  # noqa: ASYNC110 - in a store
        await asyncio.sleep(0.02)


async def attempt_of(store: Store, number: int) -> Attempt:
    """Return the only attempt of a rollout."""
    [attempt] = await store.attempts([f"ro-{number}"])
    return attempt
