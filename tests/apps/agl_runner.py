"""A runner in a process of its own: `agl_runner.py STORE COUNT` works on so many rollouts."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import lightspan.agl as agl


class Halves(agl.LitAgent[Any]):
    """Its reward is half of what the prompt makes of the task."""

    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        prompt = resources["prompt"]
        assert isinstance(prompt, agl.PromptTemplate)
        return float(prompt.format(n=task)) / 2


async def main(store: str, count: int) -> None:
    client = agl.LightningStoreClient(store)
    runner = agl.LitAgentRunner[Any](agl.OtelTracer(), count, poll_interval=0.02)
    with runner.run_context(agent=Halves(), store=client, worker_id=7):
        await runner.iter()
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
