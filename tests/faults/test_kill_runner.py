"""Test `kill -9` of runner processes at random moments: every rollout ends exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checks import check_all  # type: ignore[import-not-found]
from fault_gateway import TOKENIZER, rollouts, script  # type: ignore[import-not-found]

from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.runners.timings import RunnerTimings
from lightspan.schema.records import RolloutStatus
from lightspan.stores import open_store
from lightspan_gateway import Gateway
from lightspan_testing.scripted_engine import ScriptedEngine

HERE = Path(__file__).parent
KILLS = 12 if os.environ.get("LIGHTSPAN_SEED") else 6


@pytest.mark.faults
@pytest.mark.timeout(570)
async def test_kill_runners(tmp_path: Path, moments: Callable[[Any], random.Random]) -> None:
    randomly = moments("answers")
    engine = ScriptedEngine(TOKENIZER, script, pace_s=0.03)
    async with (
        open_store(f"sqlite:///{tmp_path}/run.db") as store,
        Gateway(store, engine) as gateway,
    ):
        asked = await rollouts(store, gateway.url)
        names = [rollout.rollout_id for rollout in asked]
        runners = LocalRunners(4, processes=2)
        plan = RunnerPlan(
            store_url=store.url,
            app="fault_apps:answers",
            sys_path=[str(HERE)],
            lease_s=5,
            timings=RunnerTimings(max_quick_deaths=1000),
        )
        await runners.start(plan)
        try:
            share = len(names) // KILLS
            for number in range(KILLS):  # a kill for every few rollouts: all hit work under way
                await store.enqueue(asked[number * share : (number + 1) * share])
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
        await check_all(store, names)
        assert len(await store.attempts(names)) > len(names)
