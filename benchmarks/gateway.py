"""CPU of the gateway per call and per streamed chunk, recording to SQLite included.

The engine is instant, the load comes from another process, and what is counted is the CPU time of
the gateway's process alone. Run: python benchmarks/gateway.py
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import aiohttp

from lightspan import conventions as c
from lightspan.gateway import Gateway
from lightspan.records import Mode, Rollout, new_id
from lightspan.routing import Route, Routing, Target
from lightspan.stores import open_store
from lightspan.testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer

IN_FLIGHT: Final = (1, 16, 64)
WARM: Final = 100
QUESTION: Final = [{"role": "user", "content": "How many singers are there? " * 8}]
CALL_TARGET_MS: Final = 1.5
CHUNK_TARGET_MS: Final = 0.05


def load(pipe: Connection) -> None:
    """The other process: asks as it is told until told to stop."""
    asyncio.run(_load(pipe))


async def _load(pipe: Connection) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            url, token, in_flight, calls, stream = order
            left = iter(range(calls))
            asked = [_ask(session, url, token, left, stream=stream) for _ in range(in_flight)]
            pipe.send(sum(await asyncio.gather(*asked)))


async def _ask(
    session: aiohttp.ClientSession, url: str, token: str, left: Any, *, stream: bool
) -> int:
    chunks = 0
    for _ in left:
        headers = {
            "Authorization": f"Bearer {token}",
            c.HEADER_CALL_ID: new_id("call"),
            c.HEADER_AGENT: "team/writer",
        }
        body = {"model": "policy", "messages": QUESTION, "stream": stream}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as got:
            chunks += (await got.read()).count(b"data: ")
            assert got.status == 200
    return chunks


class Bench:
    """A gateway, and a process that asks it."""

    def __init__(self, gateway: Gateway, token: str, pipe: Connection) -> None:
        self._gateway = gateway
        self._token = token
        self._pipe = pipe

    async def cpu(self, in_flight: int, calls: int, *, stream: bool) -> tuple[float, int]:
        """(CPU-seconds of this process, chunks) of that many calls."""
        started = time.process_time()
        self._pipe.send((self._gateway.url, self._token, in_flight, calls, stream))
        chunks = await asyncio.to_thread(self._pipe.recv)
        return time.process_time() - started, chunks


async def measure(calls: int, text: str, folder: Path) -> bool:
    """Print the figures; returns whether they reach the targets."""
    engine = ScriptedEngine(tiny_chat_tokenizer(), text)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=load, args=(theirs,))
    process.start()
    good = True
    async with open_store(f"sqlite:///{folder}/run.db") as store, Gateway(store, engine) as gateway:
        routing = Routing(default=Target(route=Route.POLICY, policy="policy"))
        resources = await store.put_resources({"routing": routing})
        rollout = Rollout(
            rollout_id="ro", task={}, task_id="t", resources_id=resources, mode=Mode.VAL
        )
        await store.enqueue([rollout])
        [claim] = await store.claim("bench", 1, 3600)
        bench = Bench(gateway, claim.attempt.call_token, ours)
        await bench.cpu(8, WARM, stream=False)
        await bench.cpu(8, WARM, stream=True)
        for in_flight in IN_FLIGHT:
            whole, _ = await bench.cpu(in_flight, calls, stream=False)
            engine_s = await engine_cpu(engine, calls)
            per_call = (whole - engine_s) / calls * 1e3
            good &= per_call <= CALL_TARGET_MS
            print(f"unstreamed, {in_flight:2} in flight: {per_call:.3f} ms of CPU per call")
        per_chunk = await chunk_cost(bench, engine, calls)
        good &= per_chunk <= CHUNK_TARGET_MS
        print(f"streamed: {per_chunk:.4f} ms of CPU per chunk beyond the call")
    ours.send(None)
    process.join()
    return good


async def chunk_cost(bench: Bench, engine: ScriptedEngine, calls: int) -> float:
    """Milliseconds per chunk: long streams against short ones, so that the call cancels out."""
    costs = []
    for text in ("ok", "word " * 60):
        engine._script = lambda request, text=text: text  # type: ignore[misc]
        cpu, chunks = await bench.cpu(16, calls, stream=True)
        costs.append((cpu - await engine_cpu(engine, calls), chunks))
    (short, few), (long, many) = costs
    return (long - short) / (many - few) * 1e3


async def engine_cpu(engine: ScriptedEngine, calls: int) -> float:
    """What the scripted engine itself took for the latest calls, asked again without a gateway."""
    request = engine.requests[-1]
    started = time.process_time()
    for _ in range(calls):
        engine._said.clear()
        async for _ in engine.generate(request, stream=True):
            pass
    return time.process_time() - started


def main() -> int:
    """See the module; the exit status says whether the targets are reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=600)
    parser.add_argument("--text", default="SELECT count(*) FROM singer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        good = asyncio.run(measure(options.calls, options.text, Path(folder)))
    print(f"reach: <= {CALL_TARGET_MS} ms per call, <= {CHUNK_TARGET_MS} ms per chunk")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
