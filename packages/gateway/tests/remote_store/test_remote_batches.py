"""Tests of batching: operations of one turn of the event loop share a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lightspan_gateway.remote_store.request_batcher import Item, RequestBatcher
from lightspan_gateway.remote_store.rpc import MAX_BATCH


class Server:
    """A server that answers batches after `open` is set."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.open = asyncio.Event()
        self.error: Exception | None = None

    async def send(self, items: Sequence[Item]) -> Sequence[str]:
        self.batches.append([name for name, _ in items])
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [f"answer to {name}" for name, _ in items]


async def asked(batcher: RequestBatcher[str], names: Sequence[str]) -> list[asyncio.Task[str]]:
    """Send operations in one turn of the event loop, and wait until the batch is sent."""
    tasks = [asyncio.create_task(batcher.send((name, b""))) for name in names]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


async def test_each_turn_sends_one_batch() -> None:
    server = Server()
    batcher = RequestBatcher(server.send)
    names = [str(number) for number in range(MAX_BATCH + 3)]
    tasks = [*await asked(batcher, "abc"), *await asked(batcher, "d"), *await asked(batcher, names)]
    assert server.batches == [["a", "b", "c"], ["d"], names[:MAX_BATCH], names[-3:]]
    server.open.set()
    assert await asyncio.gather(*tasks) == [f"answer to {name}" for name in [*"abcd", *names]]


async def test_an_operation_whose_caller_is_cancelled_is_not_sent() -> None:
    server = Server()
    batcher = RequestBatcher(server.send)
    [sent] = await asked(batcher, "a")
    tasks = [asyncio.create_task(batcher.send((name, b""))) for name in "bcd"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    sent.cancel()
    server.open.set()
    await asyncio.gather(sent, *tasks, return_exceptions=True)
    assert server.batches == [["a"], ["c", "d"]]


async def test_an_error_is_raised_for_the_whole_batch_and_no_other() -> None:
    server = Server()
    batcher = RequestBatcher(server.send)
    tasks = await asked(batcher, "ab")
    server.error = ConnectionError("gone")
    server.open.set()
    assert await asyncio.gather(*tasks, return_exceptions=True) == [server.error] * 2
    server.error = None
    assert await batcher.send(("c", b"")) == "answer to c"
