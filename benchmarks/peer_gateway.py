"""agentlightning 0.3.0's side of `gateway.py`: its LiteLLM proxy and its store server.

It prints its address as JSON. A line on the standard input asks how many spans are recorded; its
end ends the process. Run in the peer's environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def serve(upstream: str, out: int) -> None:
    """Serve until standard input ends; write JSON to the file descriptor `out`."""
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.store.client_server import LightningStoreServer
    from agentlightning.store.memory import InMemoryLightningStore

    def say(values: dict[str, object]) -> None:
        os.write(out, json.dumps(values).encode() + b"\n")

    memory = InMemoryLightningStore(thread_safe=True)
    store = LightningStoreServer(memory, host="127.0.0.1", port=free_port())
    await store.start()
    rollout = await store.start_rollout(input={}, mode="train")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    port = free_port()
    model = {"model": "hosted_vllm/model", "api_base": upstream, "api_key": "none"}
    proxy = LLMProxy(
        port=port,
        host="127.0.0.1",
        model_list=[{"model_name": "model", "litellm_params": model}],
        store=store,
    )
    await proxy.start()
    say({"url": f"http://127.0.0.1:{port}/rollout/{ids[0]}/attempt/{ids[1]}"})
    while await asyncio.to_thread(sys.stdin.readline):
        say({"recorded": len(await memory.query_spans(ids[0], limit=-1))})
    await proxy.stop()
    await store.stop()


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # LiteLLM prints a banner
    asyncio.run(serve(sys.argv[1], answers))
