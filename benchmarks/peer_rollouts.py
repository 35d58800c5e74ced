"""agentlightning 0.3.0's side of `rollouts.py`: its HTTP store and runner processes.

The store is its in-memory one behind its server, in a process of its own; each runner process has
a `LitAgentRunner` with its `OtelTracer`, whose agent emits LLM spans with token ids and
log-probabilities in the attributes, and returns a reward. Runs in the peer's environment; the last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import socket
import time
from typing import Any

CALLS = 8
IDS, LOGPROBS, TEXT = 640, 128, 2500
POLL_S = 0.1


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve(port: int) -> None:
    """Run the store's server."""
    from agentlightning.store.client_server import LightningStoreServer
    from agentlightning.store.memory import InMemoryLightningStore

    quiet()
    store = InMemoryLightningStore(thread_safe=True)
    server = LightningStoreServer(store, host="127.0.0.1", port=port, launch_mode="asyncio")
    asyncio.run(server.run_forever())


def work(url: str) -> None:
    """Run a runner."""
    from agentlightning import LitAgent
    from agentlightning.runner import LitAgentRunner
    from agentlightning.store.client_server import LightningStoreClient
    from agentlightning.tracer.base import get_active_tracer
    from agentlightning.tracer.otel import OtelTracer
    from agentlightning.types import TraceStatus

    class Agent(LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            tracer = get_active_tracer()
            assert tracer is not None
            for _ in range(CALLS):
                tracer.create_span(
                    "openai.chat.completion",
                    attributes={
                        "gen_ai.prompt.0.content": "x" * (TEXT - 500),
                        "gen_ai.completion.0.content": "y" * 500,
                        "prompt_token_ids": list(range(IDS - LOGPROBS)),
                        "response_token_ids": list(range(LOGPROBS)),
                        "logprobs": [-0.5] * LOGPROBS,
                    },
                    status=TraceStatus(status_code="OK"),
                )
            return 1.0

    async def run() -> None:
        runner: Any = LitAgentRunner(tracer=OtelTracer(), poll_interval=POLL_S, interval_jitter=0.0)
        with runner.run_context(agent=Agent(), store=LightningStoreClient(url)):
            await runner.iter()

    quiet()
    asyncio.run(run())


def quiet() -> None:
    """Discard logs and output, so that standard output has only the figures."""
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


async def measure(url: str, number: int, warm: int, begun: float) -> dict[str, float]:
    """Return the rollouts per second, and the seconds until the runners worked."""
    from agentlightning.store.client_server import LightningStoreClient

    store = LightningStoreClient(url)
    for _ in range(600):
        try:
            await store.add_resources({})
            break
        except Exception:
            await asyncio.sleep(POLL_S)
    await _run(store, warm)
    started = time.perf_counter()
    rollouts = await _run(store, number)
    wall = time.perf_counter() - started
    spans = 0
    for rollout in rollouts:
        found = await store.query_spans(rollout.rollout_id, limit=-1)
        spans += sum("completion" in span.name for span in found)
    await store.close()
    if spans != CALLS * number:
        raise SystemExit(f"{spans} LLM spans were stored of {CALLS * number}")
    return {"per_s": number / wall, "start_s": started - begun}


async def _run(store: Any, number: int) -> list[Any]:
    before = await _done(store)
    rollouts = [await store.enqueue_rollout(input={"question": n}) for n in range(number)]
    while await _done(store) < before + number:  # noqa: ASYNC110 (its clients can only poll)
        await asyncio.sleep(POLL_S)
    return rollouts


async def _done(store: Any) -> int:
    return len(await store.query_rollouts(status_in=["succeeded", "failed"], limit=-1))


def main() -> None:
    """Start the processes, measure, and end the processes."""
    parser = argparse.ArgumentParser(description="agentlightning's rollouts over HTTP.")
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    begun = time.perf_counter()
    processes = [spawn.Process(target=serve, args=(port,))]
    processes += [spawn.Process(target=work, args=(url,)) for _ in range(options.processes)]
    for process in processes:
        process.start()
    try:
        warm = 4 * options.processes
        print(json.dumps(asyncio.run(measure(url, options.rollouts, warm, begun))))
    finally:
        for process in processes:
            process.kill()
            process.join()


if __name__ == "__main__":
    main()
