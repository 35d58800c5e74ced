"""How long others wait while the most expensive requests are in flight."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import time
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
USER: Final = {"role": "user", "content": "How many singers are there?"}
CALL: Final[dict[str, Any]] = {"model": "policy", "messages": [USER], "max_tokens": 1}


def expensive() -> dict[str, bytes]:
    """Name → body, of up to 16 MB."""
    bodies = {
        "a million stop strings": {"stop": ["a"] * 1_000_000},
        "15 MB of metadata": {"metadata": {f"k{n}": "v" * 10 for n in range(600_000)}},
        "15 MB of one text": {"metadata": {"k": "v" * 15_000_000}},
        "60,000 messages": {"messages": [USER] * 60_000},
        "100,000 messages": {"messages": [USER] * 100_000},
        "a million empty lists": {"messages": [[]] * 1_000_000},
        "200,000 empty objects": {"messages": [{}] * 200_000},
        "700,000 token ids": {"prompt": list(range(700_000))},
        "a message of 4 MB": {"messages": [{"role": "user", "content": "a, b " * 800_000}]},
    }
    return {name: json.dumps({**CALL, **body}).encode() for name, body in bodies.items()}


async def measured(victim: Victim) -> str:
    """The worst delay of /health, and of a call with one token, for each kind of request."""
    lines = ["worst delay in ms, of /health and of a call of one token, with in flight:"]
    bomb = gzip.compress(bytes(512 * 2**20), 1)
    kinds = {"nothing": b"", **expensive(), "a bomb in gzip": bomb}
    headers = {"Authorization": f"Bearer {victim.token}", "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(victim.url, headers=headers, timeout=timeout) as session:
        for name, body in kinds.items():
            packing = {"Content-Encoding": "gzip"} if body is bomb else {}
            health, call = await _delays(session, body, packing)
            lines.append(f"  {name:24} {1000 * health:8.0f} {1000 * call:8.0f}")
    return "\n".join(lines)


async def _delays(
    session: aiohttp.ClientSession, body: bytes, packing: dict[str, str]
) -> tuple[float, float]:
    over = asyncio.Event()
    looking = [asyncio.create_task(look(session, over)) for look in (_health, _call)]
    if body:
        await asyncio.gather(*(_send(session, body, packing) for _ in range(AT_ONCE)))
    else:
        await asyncio.sleep(5)
    over.set()
    health, call = await asyncio.gather(*looking)
    return health, call


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
