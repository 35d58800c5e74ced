"""Kill runners at random while they run trials."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import Mode, Rollout, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.stores import open_store
from lightspan_harbor import HarborTasks, HarborTrial

SLOTS = 4


async def outlive_kills(
    program: HarborTrial, suite: Path, folder: Path, *, trials: int, max_pause_s: float
) -> None:
    """Run trials of a suite's only task, and kill runners after every few of them.

    Check that each succeeds once, with the reward 1. `LIGHTSPAN_SEED` moves the kills.

    Args:
        program: the app.
        suite: the suite.
        folder: folder for the store.
        trials: number of trials.
        max_pause_s: maximum seconds from the end of a trial to the kill.
    """
    [task] = HarborTasks(suite)
    names = [f"ro-{number}" for number in range(trials)]
    rollouts = [
        Rollout(
            rollout_id=name, task=task, task_id=name, mode=Mode.VAL, max_infrastructure_tries=50
        )
        for name in names
    ]
    chance = random.Random(int(os.environ.get("LIGHTSPAN_SEED", "0")))
    finished = kills = next_kill = 0
    async with open_store(f"sqlite:///{folder}/run.db") as store:
        await store.enqueue(rollouts)
        runners = LocalRunners(SLOTS)
        plan = RunnerPlan(
            store_url=store.url, app=program.reference, lease_s=10, sys_path=list(sys.path)
        )
        await runners.start(plan)
        try:
            while finished < trials:
                runners.check()
                await asyncio.sleep(0.2)
                finished = (await store.count()).get(RolloutStatus.SUCCEEDED, 0)
                if finished < next_kill:
                    continue
                await asyncio.sleep(chance.uniform(0, max_pause_s))
                if pids := runners.pids:  # else the process is being replaced
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    kills, next_kill = kills + 1, finished + chance.randint(1, 8)
                    print(f"kill {kills} after {finished} trials")
        finally:
            await runners.stop()
        attempts = [each for each in await store.attempts(names) if each.reward is not None]
    print(f"{trials} trials, {kills} kills")
    assert kills > 1
    assert sorted(each.rollout_id for each in attempts) == sorted(names)
    unsolved = {each.attempt_id: each for each in attempts if each.reward != Reward(1.0)}
    assert unsolved == {}
