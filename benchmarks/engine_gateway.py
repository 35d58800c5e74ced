"""Tokens per wall second of the embedded engine behind the gateway, called from another process.

Answers have 64 tokens, prompts about 70; the model is a random Qwen2 of 0.7 M parameters. Ours:
chat completions over HTTP, asked by another process, rendered, sampled, recorded to SQLite and
answered by one process with the engine in it. Peer: transformers' `ContinuousBatchingManager` on
the same model and prompt ids, called in its own process without HTTP, with the settings that serve
it best on a CPU (12 requests and 256 tokens a step). One torch thread each; runs alternate, and the
median of each is kept. An answer that happens to end early counts the tokens it has.

Run: python benchmarks/engine_gateway.py [--requests 256] [--repeats 3] [--json PATH]
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import aiohttp
import torch
from _report import Figure, finish, options_of
from engine import run_peer

from lightspan.schema import semconv as c
from lightspan.schema.records import Mode, Rollout, new_id
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores import open_store
from lightspan_gateway import Gateway
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine

IN_FLIGHT: Final = (1, 8, 32, 64)
TOKENS: Final = 64
REACH: Final = 0.8


def questions(count: int) -> list[list[dict[str, str]]]:
    """Return `count` different conversations."""
    return [
        [{"role": "user", "content": " ".join(f"w{(i * 7 + j) % 40}{i % 40}" for j in range(13))}]
        for i in range(count)
    ]


def make_model(folder: Path) -> Path:
    """Write the model that both sides use, and return its folder."""
    words = [" ".join(f"w{i}{j}" for i in range(40)) for j in range(40)]
    return tiny_model(
        folder / "model", seed=0, hidden=128, layers=3, context=2048, vocabulary=635, texts=words
    )


# --- the load -------------------------------------------------------------------------------
def load(pipe: Connection) -> None:
    """Run the process that sends requests, as commands from `pipe` say."""
    asyncio.run(_load(pipe))


async def _load(pipe: Connection) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            url, token, in_flight, asked = order
            started, left = time.perf_counter(), iter(asked)
            clients = [_ask(session, url, token, left) for _ in range(in_flight)]
            tokens = sum(await asyncio.gather(*clients))
            pipe.send((tokens, time.perf_counter() - started))


async def _ask(session: aiohttp.ClientSession, url: str, token: str, left: Iterator[Any]) -> int:
    tokens = 0
    for messages in left:
        headers = {"Authorization": f"Bearer {token}", c.HEADER_CALL_ID: new_id("call")}
        body = {"model": "policy", "messages": messages, "max_tokens": TOKENS}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as got:
            assert got.status == 200, await got.text()
            tokens += (await got.json())["usage"]["completion_tokens"]
    return tokens


# --- both sides -----------------------------------------------------------------------------
def ours(pipe: Connection, folder: Path, counts: Sequence[tuple[int, int]], place: Path) -> None:
    """Send our tokens per wall second for each (in flight, requests). Runs in its own process."""
    torch.set_num_threads(1)
    asyncio.run(_ours(pipe, folder, counts, place))


async def _ours(
    pipe: Connection, folder: Path, counts: Sequence[tuple[int, int]], place: Path
) -> None:
    engine = TransformersEngine({"policy": folder})
    await engine.start()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=load, args=(there,))
    process.start()
    async with open_store(f"sqlite:///{place}/run.db") as store, Gateway(store, engine) as gateway:
        routing = Routing(default=Target(route=Route.POLICY, policy="policy"))
        resources = await store.put_resources({"routing": routing})
        rollout = Rollout(
            rollout_id="ro", task={}, task_id="t", resources_id=resources, mode=Mode.VAL
        )
        await store.enqueue([rollout])
        [claim] = await store.claim("bench", 1, 3600)
        rates = {}
        for number, (in_flight, requests) in enumerate([(8, 32), *counts]):
            asked = questions(requests)
            here.send((gateway.url, claim.attempt.call_token, in_flight, asked))
            tokens, seconds = await asyncio.to_thread(here.recv)
            if number:
                rates[in_flight] = tokens / seconds
    here.send(None)
    process.join()
    await engine.close()
    pipe.send(rates)


def theirs(pipe: Connection, folder: Path, counts: Sequence[tuple[int, int]], _: Path) -> None:
    """Send the same figures of the peer."""
    torch.set_num_threads(1)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    tokenizer = load_tokenizer(folder)
    rates = {}
    for in_flight, requests in counts:
        prompts = [(tokenizer.render(asked), TOKENS) for asked in questions(requests)]
        result = run_peer(folder, prompts, in_flight, defaults=False)
        rates[in_flight] = result["tokens"] / result["wall_s"]
    pipe.send(rates)


def in_process(
    target: Any, folder: Path, counts: Sequence[tuple[int, int]], place: Path
) -> dict[int, float]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, folder, counts, place))
    process.start()
    there.close()
    try:
        rates: dict[int, float] = here.recv()
    except EOFError:
        sys.exit(f"{target.__name__} did not finish")
    process.join()
    return rates


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--requests", type=int, default=256, help="at 64 in flight (256)")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    counts = [(n, max(16, options.requests * min(n, 16) // 16)) for n in IN_FLIGHT]
    runs: dict[str, list[dict[int, float]]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as place:
        folder = make_model(Path(place))
        for number in range(options.repeats):
            store = Path(place) / str(number)
            store.mkdir()
            runs["ours"].append(in_process(ours, folder, counts, store))
            runs["theirs"].append(in_process(theirs, folder, counts, store))
    figures = [
        Figure(
            what=f"engine behind the gateway, {n} in flight",
            unit="tokens/s",
            ours=statistics.median(run[n] for run in runs["ours"]),
            theirs=statistics.median(run[n] for run in runs["theirs"]),
            peer="transformers in process",
            more_is_better=True,
            at_least=REACH,
        )
        for n in IN_FLIGHT
    ]
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
