"""Run a gateway as a process: `python fault_gateway.py <store url> <port>`."""

from __future__ import annotations

import asyncio
import sys

from fault_apps import expected  # type: ignore[import-not-found]

from lightspan.protocols.engine import GenerationRequest
from lightspan.schema.records import Mode, Rollout
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_gateway import Gateway
from lightspan_testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer

TOKENIZER = tiny_chat_tokenizer()


def script(request: GenerationRequest) -> str:
    """Return the answer to the question in the prompt."""
    said = TOKENIZER.decode(request.prompt_ids).partition("user\n")[2]
    return str(expected(said.split("\n")[0]))


async def rollouts(store: Store, gateway_url: str) -> list[Rollout]:
    """Return sixty rollouts whose calls go to the gateway."""
    target = Target(route=Route.POLICY, policy="policy")
    routing = Routing(gateway_url=gateway_url, default=target)
    resources_id = await store.put_resources({"routing": routing})
    return [
        Rollout(
            rollout_id=f"ro-{number}",
            task={"q": f"ro-{number}"},
            task_id=f"ro-{number}",
            resources_id=resources_id,
            mode=Mode.VAL,
            max_infrastructure_tries=50,
        )
        for number in range(60)
    ]


async def main(url: str, port: int) -> None:
    """Serve until killed."""
    engine = ScriptedEngine(TOKENIZER, script, pace_s=0.002)
    async with open_store(url) as store, Gateway(store, engine, port=port):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
