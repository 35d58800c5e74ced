"""What was freed is given back to the system, as long as a gateway listens."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from lightspan.gateway import Gateway
from lightspan.gateway.heap import GROWN, return_memory
from lightspan.stores.memory import MemoryStore

BLOCK = 5_000
"""Bytes: of the heap, while larger ones have pages of their own."""
BLOCKS = 20_000


def held() -> int:
    return int(psutil.Process().memory_info().rss)


@contextmanager
def split_heap() -> Iterator[int]:
    """100 MB that are free but for one block in twenty, which keeps the heap from shrinking."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for number, block in enumerate(blocks):
        if number % 20:
            libc.free(block)
    try:
        yield held()
    finally:
        for block in blocks[::20]:
            libc.free(block)


@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
async def test_a_heap_that_has_grown_is_given_back() -> None:
    returning = asyncio.create_task(return_memory(look_s=0.01))
    await asyncio.sleep(0)  # it has looked at how much there was
    with split_heap() as before:
        while held() > before - BLOCK * BLOCKS // 2:  # noqa: ASYNC110 - of the system
            await asyncio.sleep(0.01)
    assert not returning.done()
    returning.cancel()


@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
async def test_a_little_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    looked: list[int] = []

    class Process:
        def memory_info(self) -> object:
            looked.append(GROWN * min(len(looked), 1))
            return type("Memory", (), {"rss": looked[-1]})

    monkeypatch.setattr("lightspan.gateway.heap._malloc_trim", lambda: given.append)
    monkeypatch.setattr("lightspan.gateway.heap.psutil.Process", Process)
    returning = asyncio.create_task(return_memory(look_s=0))
    while len(looked) < 10:  # noqa: ASYNC110 - of a list
        await asyncio.sleep(0)
    assert given == []
    returning.cancel()


async def test_nothing_is_done_where_the_system_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan.gateway.heap._malloc_trim", lambda: None)
    assert await return_memory() is None  # type: ignore[func-returns-value]


async def test_it_is_done_as_long_as_a_gateway_listens() -> None:
    def tasks() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks()]

    async with Gateway(MemoryStore(), None):
        assert tasks().count("return_memory") == 1
    await asyncio.sleep(0)
    assert "return_memory" not in tasks()
