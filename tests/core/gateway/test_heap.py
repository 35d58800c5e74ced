"""What was freed is given back to the system, as long as a gateway listens."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from lightspan.gateway import Gateway
from lightspan.gateway.heap import GROWN, return_memory
from lightspan.stores.memory import MemoryStore

SPLIT = """
import asyncio, ctypes, psutil
from lightspan.gateway.heap import return_memory

def held():
    return psutil.Process().memory_info().rss

async def main():
    returning = asyncio.create_task(return_memory(look_s=0.01))
    await asyncio.sleep(0)  # it has looked at how much there was
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    # of the heap, while larger blocks have pages of their own
    blocks = [libc.malloc(5_000) for _ in range(20_000)]
    for block in blocks:
        ctypes.memset(block, 1, 5_000)
    for number, block in enumerate(blocks):
        if number % 20:  # one in twenty keeps the heap from shrinking
            libc.free(block)
    before = held()
    while held() > before - 50_000_000:
        await asyncio.sleep(0.01)
    assert not returning.done()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
def test_a_heap_that_has_grown_is_given_back() -> None:
    """In a process of its own: whether this one's heap grows depends on what ran before."""
    done = subprocess.run(
        [sys.executable, "-c", SPLIT], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ([0, GROWN], 0),
        ([0, GROWN + 1], 1),
        ([800 * 2**20, 900 * 2**20], 0),
        ([800 * 2**20, 901 * 2**20], 1),
    ],
)
async def test_when_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], times: int
) -> None:
    given: list[int] = []
    looks = iter([*sizes, *[0] * 100])

    class Process:
        def memory_info(self) -> object:
            return type("Memory", (), {"rss": next(looks)})

    monkeypatch.setattr("lightspan.gateway.heap._malloc_trim", lambda: given.append)
    monkeypatch.setattr("lightspan.gateway.heap.psutil.Process", Process)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await return_memory(look_s=0)
    assert given == [0] * times


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
