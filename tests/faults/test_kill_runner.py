"""`kill -9` to runner processes at random moments: every rollout ends exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.runners.timings import RunnerTimings
from lightspan.schema.records import Mode, Rollout, RolloutStatus
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores import open_store
from lightspan_gateway import Gateway
from lightspan_testing.gateway_suite import shared_tokenizer
from lightspan_testing.scripted_engine import ScriptedEngine

HERE = Path(__file__).parent
KILLS = 12 if os.environ.get("LIGHTSPAN_SEED") else 6


def load(name: str) -> Any:
    """A module beside this file."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.faults
@pytest.mark.timeout(570)
@pytest.mark.parametrize("app", [pytest.param("answers", marks=pytest.mark.long), "answers_async"])
async def test_kill_runners(
    tmp_path: Path,
    moments: Callable[[Any], random.Random],
    app: str,
) -> None:
    apps, checks = load("fault_apps"), load("checks")
    tokenizer, randomly = shared_tokenizer(), moments(app)

    def script(request: Any) -> str:
        said = tokenizer.decode(request.prompt_ids).partition("user\n")[2]
        return str(apps.expected(said.split("\n")[0]))

    engine = ScriptedEngine(tokenizer, script, pace_s=0.03)
    target = Target(route=Route.POLICY, policy="policy")
    names = [f"ro-{number}" for number in range(60)]
    async with (
        open_store(f"sqlite:///{tmp_path}/run.db") as store,
        Gateway(store, engine) as gateway,
    ):
        routing = Routing(gateway_url=gateway.url, default=target)
        resources = await store.put_resources({"routing": routing})
        fields: dict[str, Any] = {
            "resources_id": resources,
            "mode": Mode.VAL,
            "max_infrastructure_tries": 50,
        }
        rollouts = [
            Rollout(rollout_id=name, task={"q": name}, task_id=name, **fields) for name in names
        ]
        runners = LocalRunners(4, processes=2)
        plan = RunnerPlan(
            store_url=store.url,
            app=f"fault_apps:{app}",
            sys_path=[str(HERE)],
            lease_s=5,
            timings=RunnerTimings(max_quick_deaths=1000),
        )
        await runners.start(plan)
        try:
            share = len(names) // KILLS
            for number in range(KILLS):  # a kill for every few rollouts: all hit work under way
                await store.enqueue(rollouts[number * share : (number + 1) * share])
                while not (await store.count()).get(RolloutStatus.RUNNING):
                    runners.check()
                    await asyncio.sleep(0.005)
                await asyncio.sleep(randomly.uniform(0, 0.2))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(randomly.choice(runners.pids), signal.SIGKILL)
            while (await store.count()) != {RolloutStatus.SUCCEEDED: len(names)}:
                runners.check()
                await asyncio.sleep(0.05)
        finally:
            await runners.stop()
        await checks.check_all(store, names)
        assert len(await store.attempts(names)) > len(names)
