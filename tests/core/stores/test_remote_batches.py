"""What is asked at the same time travels together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lightspan.stores.remote.batches import AT_ONCE, Batches, Item
from lightspan.stores.remote.operations import MOST_TOGETHER


class Way:
    """Where batches go: all are answered once it is open."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.open = asyncio.Event()
        self.error: Exception | None = None

    async def send(self, items: Sequence[Item]) -> Sequence[str]:
        self.sent.append([item.name for item in items])
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [f"answer to {item.name}" for item in items]


async def asked(
    batches: Batches[str], names: Sequence[str], *, size: int = 1
) -> list[asyncio.Task[str]]:
    """Asked in one turn of the event loop, and on their way as far as there is one."""
    tasks = [asyncio.create_task(batches.sent(Item(name, b"x" * size))) for name in names]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def crowded(batches: Batches[str]) -> list[asyncio.Task[str]]:
    """As many on their way as there may be, each asked in a turn of its own."""
    return [task for number in range(AT_ONCE) for task in await asked(batches, [f"way {number}"])]


async def test_who_waits_goes_together() -> None:
    way = Way()
    batches = Batches(way.send)
    tasks = await crowded(batches)
    names = [str(number) for number in range(MOST_TOGETHER + 3)]
    for name in names:
        tasks += await asked(batches, [name])
    assert way.sent == [[f"way {number}"] for number in range(AT_ONCE)]
    way.open.set()
    answers = await asyncio.gather(*tasks)
    assert answers[AT_ONCE:] == [f"answer to {name}" for name in names]
    assert way.sent[AT_ONCE:] == [names[:MOST_TOGETHER], names[-3:]]


async def test_what_is_asked_in_one_turn_goes_together() -> None:
    way = Way()
    way.open.set()
    batches = Batches(way.send)
    assert await asyncio.gather(*(batches.sent(Item(name, b"")) for name in "abc")) == [
        "answer to a",
        "answer to b",
        "answer to c",
    ]
    assert way.sent == [["a", "b", "c"]]


async def test_large_ones_do_not_travel_together() -> None:
    way = Way()
    batches = Batches(way.send)
    tasks = await asked(batches, list("abcde"), size=2**19)
    way.open.set()
    await asyncio.gather(*tasks)
    assert sorted(map(len, way.sent)) == [1, 2, 2]


async def test_who_has_gone_is_not_sent() -> None:
    way = Way()
    batches = Batches(way.send)
    tasks = [*await crowded(batches), *await asked(batches, list("abc"))]
    tasks[0].cancel()  # on its way already
    tasks[AT_ONCE].cancel()
    await asyncio.sleep(0)
    way.open.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert way.sent[AT_ONCE:] == [["b", "c"]]


async def test_what_fails_fails_for_all_of_its_batch_and_no_other() -> None:
    way = Way()
    batches = Batches(way.send)
    tasks = await asked(batches, ["first"])
    way.error = ConnectionError("gone")
    way.open.set()
    with pytest.raises(ConnectionError):
        await tasks[0]
    way.error = None
    assert await batches.sent(Item("second", b"")) == "answer to second"
