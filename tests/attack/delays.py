"""How long others wait while the most expensive requests are in flight.

The requests come from a process of their own: sending 16 MB would hold up who looks at the clock.
What counts of a wait is what the victim does meanwhile, not what else the machine does: the time by
the clock less that in which the victim's event loop was ready to run and had no CPU (`/proc`,
Linux), or the CPU time of all the victim's threads meanwhile, whichever is less.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from tests.attack.victims import Victim

LIMIT_S: Final = 0.1
"""How much longer than its share of the CPU anybody may wait for others."""
AT_ONCE: Final = 3
"""Expensive requests in flight."""
TIMES: Final = 3
"""How often each of these is sent."""
PAUSE_S: Final = 0.01
"""Between two looks."""
TIMEOUT: Final = aiohttp.ClientTimeout(total=600)
NOTHING: Final = "nothing"
BOMB: Final = "a bomb in gzip"
USER: Final = {"role": "user", "content": "How many singers are there?"}
CALL: Final[dict[str, Any]] = {"model": "policy", "messages": [USER], "max_tokens": 1}


def expensive(*names: str) -> dict[str, bytes]:
    """Name → body, of up to 16 MB: of these kinds, or of all."""
    chosen = names or _KINDS
    return {name: json.dumps({**CALL, **_KINDS[name]()}).encode() for name in chosen}


def _says(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _has_tools(*functions: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function} for function in functions]}


def _numbers_in_a_call() -> dict[str, Any]:
    call = {"name": "f", "arguments": json.dumps({"a": list(range(270_000))})}
    calling = {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    return {"messages": [USER, calling]}


_KINDS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "a million stop strings": lambda: {"stop": ["a"] * 1_000_000},
    "15 MB of metadata": lambda: {"metadata": {f"k{n}": "v" * 10 for n in range(600_000)}},
    "15 MB of one text": lambda: {"metadata": {"k": "v" * 15_000_000}},
    "15 MB of line ends": lambda: _says("\n" * 7_500_000),
    "20,000 messages": lambda: {"messages": [USER] * 20_000},
    "100,000 messages": lambda: {"messages": [USER] * 100_000},
    "a million empty lists": lambda: {"messages": [[]] * 1_000_000},
    "200,000 empty objects": lambda: {"messages": [{}] * 200_000},
    "290,000 token ids": lambda: {"prompt": list(range(290_000))},
    "700,000 token ids": lambda: {"prompt": list(range(700_000))},
    "a message of 4 MB": lambda: _says("a, b " * 800_000),
    "4 MB of emoji": lambda: _says("日🙂" * 570_000),
    "4 MB of line ends": lambda: _says(" \n" * 1_300_000),
    "4 MB of special tokens": lambda: _says("<|im_end|>" * 400_000),
    "4 MB in a tool": lambda: _has_tools({"name": "f", "description": "a, b " * 800_000}),
    "numbers in a tool": lambda: _has_tools(
        {"name": "f", "parameters": {"enum": list(range(270_000))}}
    ),
    "numbers in a call": _numbers_in_a_call,
    "5,000 tools": lambda: _has_tools(*[{"name": "f", "parameters": {"type": "object"}}] * 5_000),
    "a prompt that fits": lambda: _says("a, b " * 30_000),
}


@dataclass(slots=True)
class Delays:
    """By kind of request in flight: the longest waits of /health and of a call, in seconds."""

    waits: dict[str, tuple[float, float]]
    alone: tuple[float, float]
    """Usual waits with nothing in flight."""

    @property
    def beyond(self) -> dict[str, tuple[float, float]]:
        """How much of each is more than its share of the CPU, beside the requests in flight."""
        health, call = ((AT_ONCE + 1) * usual for usual in self.alone)
        return {
            kind: (max(0.0, waits[0] - health), max(0.0, waits[1] - call))
            for kind, waits in self.waits.items()
        }

    @property
    def failed(self) -> bool:
        """Somebody waited for longer than is allowed."""
        return max(max(waits) for waits in self.beyond.values()) > LIMIT_S

    def text(self) -> str:
        """For people."""
        usual = " and ".join(f"{1000 * wait:.1f}" for wait in self.alone)
        lines = [
            f"usual waits alone {usual} ms; longest wait, and how much of it is beyond its share "
            f"of the CPU (at most {1000 * LIMIT_S:.0f}), of /health and of a call of one token:"
        ]
        for kind, waits in self.waits.items():
            shown = zip(waits, self.beyond[kind], strict=True)
            columns = (f"{1000 * wait:8.0f} {1000 * beyond:6.0f}" for wait, beyond in shown)
            lines.append(f"  {kind:24} {'  '.join(columns)} ms")
        return "\n".join(lines)


async def measured(victim: Victim) -> Delays:
    """How long /health and a call of one token wait, for each kind of request in flight."""
    client = {
        "base_url": victim.url,
        "headers": {"Authorization": f"Bearer {victim.token}", "Content-Type": "application/json"},
    }
    kinds = {**expensive(), BOMB: gzip.compress(bytes(512 * 2**20), 1)}
    if victim.name == "serve":  # its engine reads all of a prompt, which is no delay of ours
        del kinds["a prompt that fits"]
    apart = multiprocessing.get_context("spawn")
    waits: dict[str, tuple[float, float]] = {}
    with ProcessPoolExecutor(1, apart, initializer=_keep, initargs=(kinds,)) as senders:
        await asyncio.wrap_future(senders.submit(time.sleep, 0))  # it is there before we look
        async with aiohttp.ClientSession(**client, timeout=TIMEOUT) as session:
            clock = _Clock(victim.process.pid)
            for look in (_health, _call):  # what is loaded at first use
                await look(session)
            alone = (0.0, 0.0)
            for kind in (NOTHING, *kinds):
                health, call = await _waits(session, senders, client, clock, kind)
                waits[kind] = max(health), max(call)
                if kind == NOTHING:
                    alone = statistics.median(health), statistics.median(call)
    return Delays(waits, alone)


class _Clock:
    """Times of the victim.

    Args:
        pid: of the victim, whose main thread has the event loop.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def now(self) -> tuple[float, float]:
        """(what passes unless its event loop has no CPU, its CPU time), in seconds.

        The clock's number is that of `clock_getcpuclockid`, which Python does not have.
        """
        clock = time.monotonic()
        if sys.platform != "linux":
            return clock, clock
        ready = Path(f"/proc/{self._pid}/schedstat").read_text().split()[1]  # in nanoseconds
        return clock - int(ready) / 1e9, time.clock_gettime(~self._pid << 3 | 2)


async def _waits(
    session: aiohttp.ClientSession,
    senders: ProcessPoolExecutor,
    client: dict[str, Any],
    clock: _Clock,
    kind: str,
) -> tuple[list[float], list[float]]:
    over = asyncio.Event()

    async def looked(look: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> list[float]:
        found = []
        while not over.is_set():
            before = clock.now()
            await look(session)
            found.append(min(b - a for a, b in zip(before, clock.now(), strict=True)))
            await asyncio.sleep(PAUSE_S)
        return found

    looking = [asyncio.create_task(looked(look)) for look in (_health, _call)]
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


async def _health(session: aiohttp.ClientSession) -> None:
    async with session.get("/health") as answer:
        await answer.read()


async def _call(session: aiohttp.ClientSession) -> None:
    async with session.post("/v1/chat/completions", json=CALL) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
