"""How long others wait while the most expensive requests are in flight.

The requests come from a process of their own: sending 16 MB would hold up who looks at the clock.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import Any, Final

import aiohttp
from tests.attack.victims import Victim

AT_ONCE: Final = 3
"""Expensive requests in flight."""
TIMES: Final = 5
"""How often each of these is sent."""
PAUSE_S: Final = 0.01
"""Between two looks."""
TIMEOUT: Final = aiohttp.ClientTimeout(total=600)
NOTHING: Final = "nothing"
BOMB: Final = "a bomb in gzip"
USER: Final = {"role": "user", "content": "How many singers are there?"}
CALL: Final[dict[str, Any]] = {"model": "policy", "messages": [USER], "max_tokens": 1}


def expensive() -> dict[str, bytes]:
    """Name → body, of up to 16 MB."""
    bodies = {
        "a million stop strings": {"stop": ["a"] * 1_000_000},
        "15 MB of metadata": {"metadata": {f"k{n}": "v" * 10 for n in range(600_000)}},
        "15 MB of one text": {"metadata": {"k": "v" * 15_000_000}},
        "20,000 messages": {"messages": [USER] * 20_000},
        "100,000 messages": {"messages": [USER] * 100_000},
        "a million empty lists": {"messages": [[]] * 1_000_000},
        "200,000 empty objects": {"messages": [{}] * 200_000},
        "290,000 token ids": {"prompt": list(range(290_000))},
        "700,000 token ids": {"prompt": list(range(700_000))},
        "a message of 4 MB": {"messages": [{"role": "user", "content": "a, b " * 800_000}]},
    }
    return {name: json.dumps({**CALL, **body}).encode() for name, body in bodies.items()}


async def measured(victim: Victim) -> str:
    """The worst delay of /health, and of a call with one token, for each kind of request."""
    lines = ["worst delay in ms, of /health and of a call of one token, with in flight:"]
    client = {
        "base_url": victim.url,
        "headers": {"Authorization": f"Bearer {victim.token}", "Content-Type": "application/json"},
    }
    kinds = {**expensive(), BOMB: gzip.compress(bytes(512 * 2**20), 1)}
    apart = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, apart, initializer=_keep, initargs=(kinds,)) as senders:
        await asyncio.wrap_future(senders.submit(time.sleep, 0))  # it is there before we look
        async with aiohttp.ClientSession(**client, timeout=TIMEOUT) as session:
            for kind in (NOTHING, *kinds):
                health, call = await _delays(session, senders, client, kind)
                lines.append(f"  {kind:24} {1000 * health:8.0f} {1000 * call:8.0f}")
    return "\n".join(lines)


async def _delays(
    session: aiohttp.ClientSession, senders: ProcessPoolExecutor, client: dict[str, Any], kind: str
) -> tuple[float, float]:
    over = asyncio.Event()
    looking = [asyncio.create_task(look(session, over)) for look in (_health, _call)]
    await asyncio.wrap_future(senders.submit(_sent, client, kind))
    over.set()
    health, call = await asyncio.gather(*looking)
    return health, call


_bodies: dict[str, bytes] = {}
"""In the process that sends them, by kind."""


def _keep(kinds: dict[str, bytes]) -> None:
    _bodies.update(kinds)


def _sent(client: dict[str, Any], kind: str) -> None:
    """Send a kind of request, again and again, and read what is answered."""
    if kind == NOTHING:
        time.sleep(5)
    else:
        asyncio.run(_send_several(client, kind))


async def _send_several(client: dict[str, Any], kind: str) -> None:
    packing = {"Content-Encoding": "gzip"} if kind == BOMB else {}
    async with aiohttp.ClientSession(**client, timeout=TIMEOUT) as session:
        sending = (_send(session, _bodies[kind], packing) for _ in range(AT_ONCE))
        await asyncio.gather(*sending)


async def _send(session: aiohttp.ClientSession, body: bytes, packing: dict[str, str]) -> None:
    for _ in range(TIMES):
        sent = session.post("/v1/chat/completions", data=io.BytesIO(body), headers=packing)
        with suppress(aiohttp.ClientError):  # it may be refused before all of it is sent
            async with sent as answer:
                await answer.read()


async def _health(session: aiohttp.ClientSession, over: asyncio.Event) -> float:
    worst = 0.0
    while not over.is_set():
        started = time.monotonic()
        async with session.get("/health") as answer:
            await answer.read()
        worst = max(worst, time.monotonic() - started)
        await asyncio.sleep(PAUSE_S)
    return worst


async def _call(session: aiohttp.ClientSession, over: asyncio.Event) -> float:
    worst = 0.0
    while not over.is_set():
        started = time.monotonic()
        async with session.post("/v1/chat/completions", json=CALL) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        worst = max(worst, time.monotonic() - started)
        await asyncio.sleep(PAUSE_S)
    return worst
