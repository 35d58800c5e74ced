"""Sends hostile requests from many connections at once, and counts what comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from tests.attack.hostile import Hostile

CONNECTIONS: Final = 32
PATIENCE_S: Final = 120.0
"""Whatever is not answered by then is not answered."""
GROWTH: Final = 128 * 2**20
"""Bytes by which the victim's memory may grow between two looks, however few requests there are
between them: caches fill, and what is freed is kept by the C library for what comes."""
GROWTH_EACH: Final = 512
"""Bytes more for each request: the heap goes on to grow by some 350 while what is in use stays."""
KEPT: Final = 20
"""Requests that are shown of those that went wrong."""


class BadAnswerError(Exception):
    """What came back is no answer."""


@dataclass(slots=True)
class Outcome:
    """What came back."""

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    """Connections that were closed, or stayed open, without the answer that HTTP allows."""
    wrong: list[str] = field(default_factory=list)
    """What was answered with 5xx, or not at all, the first of them."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """(requests so far, bytes that the victim held), at each look."""

    @property
    def tried(self) -> int:
        return sum(self.kinds.values())

    @property
    def failed(self) -> int:
        """Answers of 5xx."""
        return sum(count for status, count in self.statuses.items() if status >= 500)

    @property
    def grown(self) -> tuple[int, int]:
        """(bytes by which the victim grew from the first look to the last, bytes it may grow)."""
        if not self.memory:
            return 0, GROWTH
        (first, before), (last, after) = self.memory[0], self.memory[-1]
        return after - before, GROWTH + GROWTH_EACH * (last - first)

    def text(self) -> str:
        """For people."""
        classes = Counter[str]()
        for status, count in self.statuses.items():
            classes[f"{status // 100}xx"] += count
        answered = ", ".join(f"{name} {count:,}" for name, count in sorted(classes.items()))
        return f"{self.tried:,} requests: {answered}; unanswered {self.unanswered:,}"

    def note(self, hostile: Hostile, status: int | None, why: str = "") -> None:
        """One request more; `status` is None without an answer."""
        self.kinds[hostile.kind] += 1
        if status is not None:
            self.statuses[status] += 1
        elif hostile.is_answered:
            self.unanswered += 1
        is_wrong = (status is None and hostile.is_answered) or (status or 0) >= 500
        if is_wrong and len(self.wrong) < KEPT:
            shown = hostile.data if len(hostile.data) <= 3_000 else hostile.data[:3_000] + b"..."
            self.wrong.append(f"{hostile.kind}: {status} {why}: {shown!r}")


async def attack(
    host: str,
    port: int,
    requests: Iterator[Hostile],
    count: int,
    *,
    connections: int = CONNECTIONS,
    each: Callable[[Outcome], object] = lambda outcome: None,
) -> Outcome:
    """Send so many requests.

    Args:
        host: to attack.
        port: of it.
        requests: what is sent.
        count: how many of them.
        connections: at once.
        each: is told what came back so far, after each.
    """
    outcome, left = Outcome(), iter(range(count))

    async def work() -> None:
        client = _Client(host, port)
        for _ in left:
            hostile = next(requests)
            try:
                status = await asyncio.wait_for(client.ask(hostile), PATIENCE_S)
                outcome.note(hostile, status)
            except (TimeoutError, OSError, EOFError, BadAnswerError) as error:
                client.close()
                outcome.note(hostile, None, repr(error))
            each(outcome)
        client.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    return outcome


class _Client:
    """One connection at a time."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, hostile: Hostile) -> int | None:
        """The status of the answer; None for a request that gets none."""
        if not hostile.is_framed:
            self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=2**20)
        reader, writer = self._streams
        writer.write(hostile.data)
        # it may be answered, and the connection closed, before it is read to its end
        with suppress(ConnectionError):
            await writer.drain()
        if not hostile.is_answered:
            self.close()
            return None
        status, is_kept = await _answer(reader, has_body=not hostile.data.startswith(b"HEAD"))
        if not is_kept or not hostile.is_framed:
            self.close()
        return status

    def close(self) -> None:
        """Forget the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def _answer(reader: asyncio.StreamReader, *, has_body: bool) -> tuple[int, bool]:
    """(status, whether the connection can be used again) of the answer, all of it read."""
    while True:
        first, headers = await _head(reader)
        status = int(first.split(b" ")[1])
        if status >= 200:
            break
    if has_body and status not in (204, 304):
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            await _chunks(reader)
        elif b"content-length" in headers:
            await reader.readexactly(int(headers[b"content-length"]))
        else:
            await reader.read()
            return status, False
    return status, headers.get(b"connection", b"").lower() != b"close"


async def _head(reader: asyncio.StreamReader) -> tuple[bytes, dict[bytes, bytes]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    if not first.startswith(b"HTTP/1."):
        raise BadAnswerError(f"no HTTP: {first[:80]!r}")
    pairs = (line.partition(b":") for line in lines if line)
    return first, {name.lower(): value.strip() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> None:
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        await reader.readexactly(size + 2)
        if not size:
            return
