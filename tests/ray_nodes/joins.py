"""Start runners and run one rollout: `joins.py ADDRESS STORE [without_token]`.

Prints the result or the error.
"""

from __future__ import annotations

import asyncio
import sys

from lightspan import RayRunners
from lightspan.errors import LightspanError
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import Mode, Rollout
from lightspan.stores import open_store


async def main(address: str, url: str, without_token: bool) -> None:
    plan = RunnerPlan(store_url=url, app="lightspan_testing.sample_apps:right", run_id="run-1")
    runners = RayRunners(1, address=address, cpus=0.5, without_token=without_token)
    try:
        await runners.start(plan)
    except LightspanError as error:
        print(f"{type(error).__name__}: {error}")
        return
    async with open_store(url) as store:
        rollout = Rollout(
            rollout_id="ro-1", task={"number": 3}, task_id="t", run_id="run-1", mode=Mode.VAL
        )
        await store.enqueue([rollout])
        while not (await store.rollouts(["ro-1"]))[0].status.final:
            runners.check()
            await asyncio.sleep(0.05)
        [attempt] = await store.attempts(["ro-1"])
    await runners.stop()
    print(f"ran: {attempt.reward.value if attempt.reward else attempt}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], "without_token" in sys.argv))
